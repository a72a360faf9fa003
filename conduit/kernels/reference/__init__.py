"""The specification of what kernels compute: plain numpy, float64, slow."""
