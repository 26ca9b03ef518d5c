"""Agreements: the document people write, what it compiles to, and how slices and budgets are judged.

Everything here is pure: no clock, no I/O, no threads, no SQL. ``load`` reads YAML text into the models of
``document`` and words what is wrong with it, ``promise`` reduces documents to what judging and control need,
``thresholds`` to what gateways count, ``slices`` judges one slice, ``compliance`` sums judged slices up.
"""
