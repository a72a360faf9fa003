"""Kernels as machine code: compiled ahead of time into a library, or by one process at a time."""
