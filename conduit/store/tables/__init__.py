"""A table as a process sees it: columns and words, queues, statistics, weights, named loaders."""
