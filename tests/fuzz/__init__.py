"""Fuzzers: each finds what no one thought of. ``make fuzz`` runs them long, the suite runs them bounded."""
