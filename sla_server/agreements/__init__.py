"""Agreements: the document people write, what it compiles to, and how slices and budgets are judged.

Everything here is pure: no clock, no I/O, no threads, no SQL. ``load`` reads YAML text, ``compile`` reduces
documents to promises and threshold sets, ``slices`` judges one slice, ``budget`` sums judged slices up.
"""
