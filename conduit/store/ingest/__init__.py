"""Kernels that write rows: they check, copy and commit a row, and turn to the next page when the page is full."""
