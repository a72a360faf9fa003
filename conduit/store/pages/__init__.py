"""The life of a page: claimed, opened, sealed, leased, recovered; and the counting, deleting and rate limiting of its rows."""
