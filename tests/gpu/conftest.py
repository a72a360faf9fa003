"""The suites below have processes of their own: test_suites.py starts them, and so may a person, by naming the folder."""

collect_ignore = ["interpret", "device", "aot"]
