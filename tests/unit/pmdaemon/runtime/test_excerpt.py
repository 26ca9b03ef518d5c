"""A peer's values in our texts: short, printable, and never an exception."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.runtime.excerpt import EXCERPT_CHARACTERS, excerpt, printable, printable_lines

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary() | st.integers(), inner),
)


@given(value=ANY, limit=st.integers(10, 500))
def test_any_value_is_short_and_printable(value: Any, limit: int) -> None:
    for text in (excerpt(value, limit), printable(value, limit)):
        assert len(text) <= limit
        assert text.isprintable()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (5, "5"),
        (True, "True"),
        (0.5, "0.5"),
        ("text", "'text'"),
        (b"\x1b", "b'\\x1b'"),
        ([1, [2, [3, [4]]]], "[1, [2, [3, [...]]]]"),
        ({"b": 1, "a": {"c": {"d": {"e": 1}}}}, "{'b': 1, 'a': {'c': {'d': {...}}}}"),
        ([1] * 9, "[1, 1, 1, 1, ...]"),
        (dict.fromkeys("abcdef", 1), "{'a': 1, 'b': 1, 'c': 1, 'd': 1, ...}"),
        (object(), "<object>"),
    ],
)
def test_forms(value: Any, shown: str) -> None:
    assert excerpt(value) == shown


def test_depth_and_size_cost_nothing() -> None:
    deep: Any = reduce(lambda inner, _: [inner], range(100_000), 1)
    assert len(excerpt(deep)) < EXCERPT_CHARACTERS
    while deep != 1:  # taken apart by hand: the interpreter would recurse to free it
        deep = deep[0]
    assert len(excerpt("x" * 10**7)) <= EXCERPT_CHARACTERS
    assert len(excerpt(b"x" * 10**7)) <= EXCERPT_CHARACTERS


def test_lines_stay_lines() -> None:
    assert printable_lines("one\ttwo\n\x1b[2Jthree\r\n") == "one two\n\ufffd[2Jthree \n"
    assert printable("a\nb", 10) == "a b"


def test_a_number_of_thousands_of_digits_is_named_by_its_size() -> None:
    """Python refuses to write it; hexadecimal in a document makes one."""
    assert excerpt(10**30) == str(10**30)
    assert excerpt(10**5000) == excerpt(-(10**5000)) == "<int of 16610 bits>"
    assert excerpt({10**5000: 1}) == "{<int of 16610 bits>: 1}"
