"""Conformance suites: one for each contract of `conduit.contracts`.

An implementation passes a suite by one subclass in a test module, which says how to make one:

    class TestCommitEvery(IngestionTests):
        def make(self) -> Ingestion:
            return CommitEvery(8)

A suite's methods assert. A test runner only has to call `setup_method`, a test and `teardown_method`, each test on a new object. `failures`
is such a runner; it shows that a suite catches a broken implementation.
"""
