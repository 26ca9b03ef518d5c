"""Benchmarks and the demonstration. All figures in README and docs come from here; anyone can rerun them."""
