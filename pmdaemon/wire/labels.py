"""Labels of volumes: what a key and a value may be, and how many a volume may have.

An agent says them in REGISTER, the server's documents override them, selectors of agreements choose volumes
by them. Commas, brackets and signs are what selectors are written with, so no key or value has any. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MAX_LABELS: Final = 16
"""Of one volume; 512 volumes are announced in one header of 64 KiB."""
_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_VALUE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,62}")
KEY_RULE: Final = "1-63 of letters, digits and . _ / -, beginning with a letter or digit"
VALUE_RULE: Final = "1-63 of letters, digits and . _ : @ / -, beginning with a letter or digit"


def is_label_key(text: Any) -> bool:
    """Whether it may be the key of a label."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def is_label_value(text: Any) -> bool:
    """Whether it may be the value of a label."""
    return isinstance(text, str) and _VALUE.fullmatch(text) is not None


def why_no_labels(labels: Mapping[Any, Any]) -> str:
    """What is wrong with the labels of a volume, naming key, value and rule; "" if nothing is."""
    if len(labels) > MAX_LABELS:
        return f"{len(labels)} labels, the limit of a volume is {MAX_LABELS}"
    for key, value in labels.items():
        if not is_label_key(key):
            return f"the key {str(key)[:80]!r}: a key is {KEY_RULE}"
        if not is_label_value(value):
            return f"the value {str(value)[:80]!r} of {key}: a value is {VALUE_RULE}"
    return ""


def known_labels(value: Any) -> dict[str, str]:
    """Those of a stored value that are labels; what is none is left out."""
    if not isinstance(value, dict):
        return {}
    usable = [(key, text) for key, text in value.items() if is_label_key(key) and is_label_value(text)]
    return dict(usable[:MAX_LABELS])


def size_bytes(labels: Mapping[str, str]) -> int:
    """About how much of a header they take."""
    return 8 + sum(4 + len(key) + len(value) for key, value in labels.items()) if labels else 0
