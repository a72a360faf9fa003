"""Control point *ingestion*: writers, from the caller's `append` to the row in its page."""
