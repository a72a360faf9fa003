"""Which windows a batch is made of."""
