"""Parquet files under the SQL manifest: where they lie, which count, and the upkeep that keeps them few.

``writer`` fills files with raw cuts, ``store`` knows paths and URLs, ``manifest`` the table that says which
files count, ``upkeep`` merges and deletes, ``export`` moves old rollups here, ``verify`` checks. Design:
docs/design/5-storage.md, "Files".
"""
