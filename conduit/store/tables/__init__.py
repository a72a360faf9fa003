"""Tables as one process uses them: views of columns and words, queues, statistics, weights, named loaders."""
