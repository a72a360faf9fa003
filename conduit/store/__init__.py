"""Where rows are: segment, words, protocol, participants, leases, weights. Knows nothing of batches."""
