"""`python -m spillway doctor JOB`: what of a job Spillway serves, what it saves, what stands against it, and the lines to add."""
