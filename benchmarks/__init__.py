"""Benchmarks: `python -m benchmarks simulate | replay | compare | demo | micro | host | report`."""
