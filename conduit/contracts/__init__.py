"""Contracts of the parts of Conduit that can be replaced, as abstract classes and protocols; nothing here depends on an implementation.

    ingestion   when the rows that a writer commits become visible
    placement   which memory a stream's pages live in
    delivery    which batch a learner gets next, and when it is made
    sampler     which windows a batch is made of
    device      memory, streams and events of the device that batches are made on

Each docstring says whether a method blocks, whether it is atomic, what is left after a failure, which threads may call it, and where
there is no guarantee. `conduit.testing.suites` holds a conformance suite for each contract; a new implementation passes it by one
subclass.
"""
