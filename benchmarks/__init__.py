"""Benchmarks: `python -m benchmarks.NAME` in the root of a checkout measures one."""
