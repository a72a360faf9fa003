"""Checkpoints: writing a segment into files, and reading it back."""
