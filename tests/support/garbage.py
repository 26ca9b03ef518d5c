"""The end of what a library leaves to the collector of garbage: here, not within a later test.

A socket in a cycle of objects is closed whenever the collector comes, with a ResourceWarning, which is an
error in whatever test of whatever file runs by then.
"""

from __future__ import annotations

import gc
import warnings


def collect() -> None:
    """Close what nobody holds any more, without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
