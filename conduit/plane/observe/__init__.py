"""Read-only views of engines and machines from outside, and the removal of engines whose owner is dead."""
