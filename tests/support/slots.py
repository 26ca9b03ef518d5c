"""The state of an object with ``__slots__`` as plain values, to compare two objects by all they hold."""

from __future__ import annotations

from typing import Any


def values_of(thing: Any) -> Any:
    """Plain values, also of what it holds."""
    if isinstance(thing, dict):
        return {key: values_of(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [values_of(item) for item in thing]
    if slots := getattr(type(thing), "__slots__", ()):
        return {name: values_of(getattr(thing, name)) for name in slots}
    return thing
