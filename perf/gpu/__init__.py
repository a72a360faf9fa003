"""What perf/gpu_check.py is made of: measurements on a CUDA device, or one tiny round of each in Triton's interpreter."""
