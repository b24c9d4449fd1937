"""Measurements against what else is installed; `python -m spillway.bench`."""
