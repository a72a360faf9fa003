"""What a batch is, as data: plans, windows, transforms. Nothing here computes."""
