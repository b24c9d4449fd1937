"""Steps that start during backward. A bucket of gradients is stepped as soon as backward has completed them, before the verdict on the
whole step is known. The verdict keeps what was stepped, or has it repeated; what the program has changed since is taken back, and stepped
anew. So the bits are those of a step that waits.

| question | home |
|---|---|
| Does a step start during backward, or wait? | `Decision` |
| Which buckets has backward completed? | `Arrivals` |
| Has memory room for the log of a bucket's early step? | `Plan` in torch/_offload/plan.py (`_with_logs`) |
| What was submitted? Which thread waits for the gradients of a device? | `Round` |
| For which devices does the library wait itself? | `after` in gpu_events.py |
| What is done by a thread beside the program, whatever its signal handlers, forks and its end? | `Worker` |
| How is a step on a tier fetched, taken back, kept, repeated and published? | `TierStep` |
| Are the options but for the factor of the gradients the same? | `but_factor` in _groups.py |
| Has the program written to a tensor since? | _written.py |
| What does the norm say? | `verdict` in torch/_norm.py; DeepSpeed's own for its optimizers |

States in host memory: `OffloadSteps` and `Plan` (torch/_offload/), DeepSpeed's SuperOffload (deepspeed/_superoffload.py, _rounds.py).
States on a tier: `Beside` (torch/_tier_step.py), `Overlap` (deepspeed/_tier_overlap.py)."""
