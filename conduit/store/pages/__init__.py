"""The life of a page: claimed, opened, sealed, held, recovered; its rows counted, deleted, let through by limits."""
