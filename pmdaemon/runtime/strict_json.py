"""JSON as every reader takes it: no NaN, no infinity, nothing that JSON has no form for.

Python writes and reads ``NaN``; browsers and most programs refuse the whole document. What we write is
strict; a value that has no form becomes null (numbers) or its excerpt (all else), so that one bad value never
costs the document it is in. What is stored already is read in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from pmdaemon.runtime.excerpt import excerpt, printable

MAX_DEPTH: Final = 32
UNREADABLE_CHARACTERS: Final = 200


def dumps(value: Any, *, default: Callable[[Any], Any] | None = None, **form: Any) -> str:
    """JSON, compact unless ``separators`` are given; ``form`` as in ``json.dumps``.

    A value that cannot be written is replaced, never raised for.
    """
    form = {"separators": (",", ":"), **form, "allow_nan": False}
    try:
        return json.dumps(value, default=default, **form)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(cleaned(value, default), **form)


def loads(text: str) -> Any:
    """A stored value; NaN and infinities become None, and text that is no JSON stays text, cut."""
    try:
        return json.loads(text, parse_constant=lambda _name: None)
    except (ValueError, RecursionError):
        return printable(text, UNREADABLE_CHARACTERS)


def cleaned(value: Any, default: Callable[[Any], Any] | None = None, depth: int = MAX_DEPTH) -> Any:
    """The same value with what JSON cannot hold replaced."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not depth or not isinstance(value, Mapping | list | tuple):
        return default(value) if depth and default is not None else excerpt(value)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else excerpt(key): cleaned(item, default, depth - 1)
            for key, item in value.items()
        }
    return [cleaned(item, default, depth - 1) for item in value]
