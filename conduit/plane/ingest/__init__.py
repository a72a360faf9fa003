"""Control point *ingestion*: writers, from the call that brings a row to the page that it lies in."""
