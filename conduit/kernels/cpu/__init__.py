"""CPU kernels: they resolve drawn rows into windows, and gather the windows' rows into batches."""
