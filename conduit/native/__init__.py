"""What kernels stand on: how they are called, atomic memory, waiting, random numbers. Knows no store."""
