"""Shared memory with a name and an owner: files, locks, participants, and what dead processes leave behind."""
