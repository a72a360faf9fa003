"""The specification of the kernels, in plain numpy and float64; slow on purpose."""
