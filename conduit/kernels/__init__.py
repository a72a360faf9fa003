"""How rows become batches: plans, CPU kernels, and the float64 reference they are held to. Takes arrays, never stores."""
