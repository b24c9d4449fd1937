"""Steps that start during backward. A bucket of gradients is stepped as soon as backward has completed them, before the verdict on the
whole step is known. The verdict keeps what was stepped, or has it repeated; what the program has changed since is taken back, and stepped
anew. So the bits are those of a step that waits.

One object is the step: `EarlyStep` has its buckets, arrivals, verdict, publication and retry. Behind it is one of two places of the states:

| place | class | users |
|---|---|---|
| host memory | `MemoryStep` | `Plan` of offload() (torch/_offload/), `SuperOffloadCPUOptimizer` of DeepSpeed (deepspeed/_rounds.py) |
| a tier | `TierStep` | `Beside` of torch's tier (torch/_tier_step.py), `Overlap` of DeepSpeed's (deepspeed/_tier_overlap.py) |

| question | home |
|---|---|
| When are buckets rolled back? When is the verdict carried out? What happens after a signal handler has raised? | `EarlyStep` |
| Does the program have a step wait for step()? | `waits` of `EarlyStep` |
| Were the last steps in vain, so that the next ones wait? | the library's rounds (src/offload/speculate/round.rs); of tiers `TierStep` |
| Which buckets has backward completed? | `Arrivals` |
| Has memory room for the log of a bucket's early step? | `_with_logs` in torch/_offload/plan.py |
| What was submitted? Which thread waits for the gradients of a device? | `Round` |
| For which devices does the library wait itself? | `after` in gpu_events.py |
| What is done by a thread beside the program, whatever its signal handlers, forks and its end? | `Worker` |
| Are the options but for the factor of the gradients the same? | `but_factor` in _groups.py |
| Has the program written to a tensor since? | _written.py |
| What does the norm say? | `verdict` in torch/_norm.py; DeepSpeed's own for its optimizers |"""
