"""Looks at engines and machines from outside."""
