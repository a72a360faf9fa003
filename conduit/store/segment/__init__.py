"""Memory that has a name and an owner: files, locks, participants, and what is left of the dead."""
