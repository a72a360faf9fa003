"""Pieces for testing Conduit, and what is built on it: rows that prove themselves, kills at random and at each instruction.

Nothing in `conduit` imports this package.
"""
