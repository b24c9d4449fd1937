"""The figures of running optimizers: a process publishes its own, `python -m spillway watch` and `metrics` show those of others."""
