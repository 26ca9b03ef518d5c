"""The term of a server that is one of several, as its processes look at it."""

import json
from pathlib import Path

import pytest

from pmdaemon.runtime.term import FENCE, LEASE_FILE, Term


class Boot:
    """A clock since boot."""

    now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def _publish(folder: Path, fence: int, until_ns: int) -> None:
    (folder / LEASE_FILE).write_text(json.dumps({"fence": fence, "until_ns": until_ns}))


def test_it_lasts_until_the_time_in_the_file_and_longer_if_that_is_renewed(tmp_path: Path) -> None:
    boot = Boot()
    term = Term(tmp_path, 7, boot)
    assert not term.is_on()  # there is no file
    _publish(tmp_path, 7, 2_000)
    assert term.is_on()
    _publish(tmp_path, 7, 3_000)
    boot.now_ns = 2_999
    assert term.is_on()
    boot.now_ns = 3_000
    assert not term.is_on()
    _publish(tmp_path, 7, 4_000)
    assert term.is_on()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fence": 7}', '{"fence": 7, "until_ns": null}'])
def test_a_file_that_says_nothing_of_it_ends_it(tmp_path: Path, text: str) -> None:
    boot = Boot()
    term = Term(tmp_path, 7, boot)
    (tmp_path / LEASE_FILE).write_text(text)
    assert not term.is_on()


def test_a_later_term_of_the_same_server_is_another_one(tmp_path: Path) -> None:
    """Its processes were stopped with the machine, and the supervisor has not ended them yet."""
    boot = Boot()
    term = Term(tmp_path, 7, boot)
    _publish(tmp_path, 7, 2_000)
    assert term.is_on()
    _publish(tmp_path, 9, 9_000)
    boot.now_ns = 5_000
    assert not term.is_on()


def test_a_server_that_is_alone_has_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FENCE, raising=False)
    assert Term.of_environment(tmp_path).is_on()
    monkeypatch.setenv(FENCE, "7")
    assert not Term.of_environment(tmp_path).is_on()
