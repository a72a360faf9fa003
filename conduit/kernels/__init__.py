"""How rows become batches: plans, kernels for the CPU and the GPU, and the slow reference that specifies them; knows no store."""
