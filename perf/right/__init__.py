"""The cases of `python -m perf.bars right`, one module for each part of the code: what once went wrong, and the right value."""
