"""Refusals in the words of the command line: option, value and limit; none of Python or of the API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.agreements.periods import MAX_WINDOW_S
from sla_server.cli import maintenance
from sla_server.cli.main import cli
from tests.support.cli import Terminal
from tests.support.simulate import AGREEMENT

FOREIGN = re.compile(
    r"Input should|valid (number|integer)|duration_s|spec\.|String should|line [0-9]|have the form"
)


def as_services_do(header: dict[str, Any]) -> tuple[bool, int, dict[str, Any]]:
    try:
        load_documents(header["body"]["documents"], 60)
    except AgreementsRefused as exc:
        problems = [problem.as_dict() for problem in exc.problems]
        return False, 422, {"detail": "1 problem in the documents", "errors": problems}
    return True, 200, {"applied": []}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gold", "--for", "500d"], "--for '500d' is too long; give at most 400d"),
        (["gold", "--for", "2"], "--for '2' has no unit; write 2s, 2m, 2h or 2d"),
        (["gold", "--for", "nan"], "--for 'nan' is not a duration"),
        (["gold", "--for", "2h", "--reason", "x" * 600], "--reason: has 600 characters, at most 500"),
        (["gold", "--for", "2h", "--reason", ""], "--reason: is empty"),
        (["gold", "--for", "2h", "--name", "a b"], "--name: 'a b' is not a name"),
        (["not a name", "--for", "2h"], "AGREEMENTS: 'not a name' is not a name or pattern"),
        (["--volume", "vol 1", "--for", "2h"], "--volume: 'vol 1' is not a name or pattern"),
    ],
)
def test_maintenance_is_refused_in_words_of_its_options(sla: Terminal, words: list[str], says: str) -> None:
    sla.mailbox.answer = as_services_do
    reason = [] if "--reason" in words else ["--reason", "new disks"]
    done = sla("maintenance", "start", *words, *reason)
    assert done.exit_code == 2
    assert says in done.stderr
    assert not FOREIGN.search(done.stderr), done.stderr


def test_maintenance_may_last_as_long_as_a_document_says() -> None:
    assert maintenance.MOST_S == MAX_WINDOW_S


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ("volume=gold,iops=nan", "iops: is not a number (value: 'nan')"),
        ("volume=gold,iops=2000000", "iops: should be at most 1,000,000 (value: '2000000')"),
        ("volume=gold,iops=x", "iops: should be a number (value: 'x')"),
        ("volume=gold,iops=3,000", "iops=3,000: a comma ends a value. Write iops=3000"),
        ("volume=gold,depth=1.5", "depth: should be a whole number (value: '1.5')"),
        ("volume=gold,depth=5000", "depth: should be at most 4,096 (value: '5000')"),
        (
            "volume=gold,iops=60,shape=saw",
            "shape: should be 'steady', 'ramp', 'square' or 'bursty' (value: 'saw')",
        ),
        ("volume=gold iops=60", "volume: is not a name (letters, digits and . _ : @ -, at most 128)"),
        ("volume=gold,iops=60,kib=0", "kib: should be above 0 (value: '0')"),
    ],
)
def test_a_load_is_refused_with_key_value_and_limit(tmp_path: Path, load: str, says: str) -> None:
    (tmp_path / "a.yaml").write_text(AGREEMENT)
    done = CliRunner().invoke(cli, ["simulate", "--slas", str(tmp_path), "--load", load])
    assert done.exit_code == 65
    assert says in done.stderr
    assert not FOREIGN.search(done.stderr), done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--duration", "0"], "--duration '0' is not a duration"),
        (["--duration", "5x"], "--duration '5x' is not a duration"),
        (["--duration", "8d"], "--duration 8d is longer than 7 days"),
        (["--until", "2026"], "--until goes with --stored"),
        (["--every"], "--every goes with --stored"),
    ],
)
def test_an_option_of_no_use_is_refused(tmp_path: Path, options: list[str], says: str) -> None:
    (tmp_path / "a.yaml").write_text(AGREEMENT)
    base = ["simulate", "--slas", str(tmp_path), "--load", "volume=gold,iops=60"]
    done = CliRunner().invoke(cli, [*base, *options])
    assert done.exit_code == 2
    assert says in done.stderr
