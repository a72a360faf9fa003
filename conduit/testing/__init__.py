"""Tools for testing Conduit and code built on it: rows whose values can be checked, kills at random moments and at each instruction.

Nothing in `conduit` imports this package.
"""
