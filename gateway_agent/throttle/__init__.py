"""Throttling: the GCRA algorithm, the three rates of a volume, and which caps are in force (all pure)."""
