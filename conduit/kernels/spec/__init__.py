"""The specification of a batch as data: plans, windows, transforms. Nothing here computes a batch."""
