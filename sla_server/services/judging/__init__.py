"""Judging of slices from SQL rollups, exactly once (SLA-MODEL.md 2)."""
