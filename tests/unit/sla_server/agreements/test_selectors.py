"""Patterns, labels, and whether two patterns can mean one name."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.agreements.selectors import can_meet, has_labels, matches, parse_labels, selects

PATTERN = st.text(alphabet="ab*?", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("vol-1", "vol-1", True),
        ("vol-1", "vol-2", False),
        ("vol-*", "vol-2", True),
        ("db-?", "db-12", False),
        ("db-*", "*-prod", True),
        ("db-*", "vol-*", False),
        ("*a", "*b", False),
        ("db-[12]", "db-?", True),
        ("db-[12", "db-?", False),
        ("*", "?", True),
        ("**", "ab?", True),
    ],
)
def test_selectors_meet_where_one_name_is_meant_by_both(one: str, other: str, meet: bool) -> None:
    assert can_meet(one, other) is meet
    assert can_meet(other, one) is meet


@given(PATTERN, PATTERN, st.text(alphabet="ab", max_size=6))
def test_whatever_both_match_shows_that_they_meet(one: str, other: str, name: str) -> None:
    if fnmatchcase(name, one) and fnmatchcase(name, other):
        assert can_meet(one, other)


@given(PATTERN, PATTERN)
def test_patterns_that_meet_have_a_name_in_common(one: str, other: str) -> None:
    names = [""]
    for _ in range(7):
        names += [name + letter for name in names for letter in "ab" if len(name) == len(names[-1])]
    common = any(fnmatchcase(name, one) and fnmatchcase(name, other) for name in names)
    assert not common or can_meet(one, other)
    if not common and "*" not in one + other:
        assert not can_meet(one, other)


ACME = {"customer": "acme", "tier": "1"}


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("customer=acme", True),
        ("customer==acme", True),
        ("customer=emca", False),
        ("tier", True),
        ("zone", False),
        ("!zone", True),
        ("!tier", False),
        ("customer!=emca", True),
        ("customer!=acme", False),
        ("zone!=x", True),
        ("tier in (1,2)", True),
        ("tier in(2, 3)", False),
        ("zone in (a)", False),
        ("tier notin (2,3)", True),
        ("tier notin (1)", False),
        ("zone notin (a)", True),
        ("customer=acme, tier in (1, 2), !zone", True),
        ("customer=acme,tier in (2),!zone", False),
        ("tier!=2,tier!=3", True),
    ],
)
def test_labels_select(text: str, selected: bool) -> None:
    assert selects(parse_labels(text), ACME) is selected


def test_a_document_names_labels_by_value() -> None:
    assert has_labels(ACME, {"customer": "acme"})
    assert has_labels(ACME, {})
    assert not has_labels(ACME, {"customer": "acme", "zone": "a"})
    assert matches("erp-1", ["crm", "erp-*"])


@pytest.mark.parametrize(
    "text",
    ["", "=x", "a=", "a=1,,b", "a=1,a=2", "b,b", "a in ()", "a in (b", "a in b", "a in (b,)", "a in (b)(c)",
     "in (a)", "!", "a b", "a!=", "!a=b", "a notin"],
)  # fmt: skip
def test_what_is_no_label_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"label"):
        parse_labels(text)
