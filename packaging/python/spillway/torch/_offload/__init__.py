"""offload(): an optimizer whose masters and states are in host memory, for parameters on any device.

| file | what |
|---|---|
| optimizer.py | the entry and the optimizer: the order of a step, the verdict, state dicts |
| plan.py | parameters with their memory on the host, buckets, lanes, and the links to devices |
| portions.py | what of a bucket is stepped in one call: tensors that are larger are divided |
| memory.py | what the parameters need in host memory, and what there is |
| forward.py | the verdict in the next forward |
| tail.py | buckets that stay on the device |
| flow.py | weights that are on the device while they are used |"""
