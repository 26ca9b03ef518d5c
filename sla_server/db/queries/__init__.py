"""The reading side of SQL: the only package outside ``db``'s own writers that issues SELECTs."""
