"""Batches on a GPU: the parts of a loader with `device="cuda"`. Importing this package does not import torch or Triton.

conduit.contracts.device says what a device must be able to do: memory, streams, events, registered host memory.

cuda, host    a CUDA device; and the machine's own memory, on which the same code runs with Triton's interpreter
registration  a process's mapping of a table, registered with the device once
row_sources   which rows the device reads by itself: from the pool, from registered host memory, or none; one contract
mirror        the pool: the table's newest pages, copied to device memory
columns       a table's columns as tensors in one block of memory
batch_maker   draws on the host, and copies the rows that the device cannot read
buffers       from a draw to a batch: one pinned block per batch in flight, its copy, and the launches
graphs        draws made by the device itself, as a graph
loader        the loader
"""
