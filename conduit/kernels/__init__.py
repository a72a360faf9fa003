"""How rows become batches: plans, CPU kernels, and the slow reference that they are held to. Takes arrays, never stores."""
