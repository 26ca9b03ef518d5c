"""The bounded part of ``make fuzz`` for the REST interface and for documents, the same cases each time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz import api, documents


@pytest.mark.parametrize("target", [api, documents])
def test_random_cases_are_answered_or_refused(target: Any) -> None:
    counts = target.cases(1, count=400)
    assert counts.cases == 400
    assert 0 < counts.refused < 400, "cases of both kinds were made"


def test_a_failure_names_seed_and_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> bool:
        raise KeyError("a defect")

    monkeypatch.setattr(api.Target, "case", defect)
    with pytest.raises(AssertionError, match="seed 5 case 0: KeyError"):
        api.cases(5, count=1)
    monkeypatch.setattr(documents, "mutated", lambda _random, _text: None)
    with pytest.raises(AssertionError, match="seed 5 case 0: "):
        documents.cases(5, count=1)
