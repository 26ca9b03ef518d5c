"""Parquet files: where they lie, which count, and the housekeeping that keeps them few and affordable.

``store`` knows paths and URLs, ``manifest`` the table that says which files count, ``plan`` decides (pure),
``merge`` and ``housekeeper`` act, ``verify`` looks after, ``backup`` copies. Design:
docs/design/5-database.md, "Files".
"""
