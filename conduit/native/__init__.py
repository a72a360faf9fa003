"""The base of all kernels: calling them, atomic memory, waiting, random numbers. It knows no store."""
