"""A segment as files, and back."""
