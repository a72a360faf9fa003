"""The parts of perf/gpu_check.py: measurements on a CUDA device, or one tiny round of each in Triton's interpreter."""
