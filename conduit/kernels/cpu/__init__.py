"""Kernels of the CPU: draws become rows, rows become batches."""
