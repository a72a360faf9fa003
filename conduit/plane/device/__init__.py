"""Batches on a GPU: what a loader with `device="cuda"` is made of. Nothing here imports torch or Triton at module level.

interface     what a device must be able to do: memory, streams, events, registered host memory
cuda, host    a CUDA device; and the machine's own memory, on which the same code runs with Triton's interpreter
registration  the process's mapping of a table, registered with the device once
residence     where a device reads rows from: pool, registered host memory, or neither; one contract
mirror        the pool: pages mirrored into a slab on the device
buffers       from a draw to a batch: one pinned block per batch in flight, its copy, and the launches
graphs        draws made by the device itself, as a graph
loader        the loader
"""
