"""Samplers: they choose the windows of a batch, uniformly, by priority or in shuffled epochs."""
