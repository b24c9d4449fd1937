"""`Staged`: any torch optimizer, whose states are elsewhere between its steps.

leaves      the tensors of a state, and the state without them
chunk       states of several parameters, one after another in host memory
lane        copies between a device and host memory, in both directions at once
home        where chunks are: in host memory
buffers     host memory through which chunks move to and from a tier
weights     parameters on a tier
words       what a commit records of states
on_tier     chunks on a tier, with their commits
inner       the class itself, which steps the parameters of one chunk at a time
flow        the order of fetches, steps and flushes
optimizer   what a program sees"""
