"""The cases of `python -m perf.bars right`, one module for each part of the code: what went wrong once, and the right value."""
