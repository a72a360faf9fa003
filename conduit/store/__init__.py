"""The storage of rows: a segment of shared memory, its pages, tables, participants and checkpoints. It knows nothing of batches."""
