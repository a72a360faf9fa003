"""How kernels are declared, built ahead of time into libraries, and compiled by one process where they were not."""
