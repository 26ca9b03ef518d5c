"""Delivery that begins with what a former release left: nothing is lost, and what was confirmed stays so.

``tests/fixtures/former/make_events.py`` says what that is.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sla_server.events.recipients.base import Held, Routed
from tests.support.faulty_disk import FaultDisk
from tests.support.partners import Partners, PartnerServer
from tests.support.paths import FIXTURES

OF_A = [f"a{number}" for number in range(1, 9)]
OF_B = ["b1", "b2", "b3"]


class Former:
    """Both servers with the disks of the former ones; ``before`` is what recipients had got from each."""

    def __init__(self, folder: Path, commit: str) -> None:
        with tarfile.open(FIXTURES / f"former/events-{commit}.tar.xz") as file:
            file.extractall(folder / "former")
        counts = json.loads((folder / "former/counts.json").read_bytes())
        self.before: dict[str, dict[str, list[str]]] = counts["got"]
        self.pair = Partners(folder, ("r", "s"), most_notices=2)
        began_us = self.pair.clock.unix_us()
        self.pair.clock.advance((counts["unix_us"] - began_us) / 1e6)
        until_us = began_us + 60_000_000
        for server, name in ((self.pair.a, "a"), (self.pair.b, "b")):
            server.kill()
            server.rig.router.routed = [Routed("r", "all", remind_s=300.0), Routed("s", "all")]
            server.rig.router.holds = lambda found, _recipient, now_us: (
                Held("quiet", until_us) if found.subject == "quiet" and now_us < until_us else None
            )
            replace_disk(server, folder / "former" / name)

    def got(self, recipient: str) -> list[str]:
        """All that a recipient has got, from the former servers and from these."""
        before = self.before["a"][recipient] + self.before["b"][recipient]
        return before + self.pair.of_recipient(recipient)


def replace_disk(server: PartnerServer, former: Path) -> None:
    for path in server.rig.folder.iterdir():
        path.unlink()
    for path in (former / "files").iterdir():
        (server.rig.folder / path.name).write_bytes(path.read_bytes())
    server.rig.disk = FaultDisk({path.name: path.read_bytes() for path in (former / "disk").iterdir()})


def order_of(name: str, identities: list[str]) -> list[str]:
    """A server's events, each where it came first; without reminders."""
    return [each for each in dict.fromkeys(identities) if each[0] == name and "/" not in each]


@pytest.fixture(params=["acdac5ae"])
def former(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    return Former(tmp_path, request.param)


@pytest.mark.parametrize("starts", ["ab", "ba", "a", "b"])
def test_what_a_former_release_left_is_delivered_once_and_in_order(former: Former, starts: str) -> None:
    pair = former.pair
    for name in starts:
        getattr(pair, name).restart()
        pair.run(1)
    pair.run(70)
    found = {recipient: former.got(recipient) for recipient in ("r", "s")}
    for recipient, identities in found.items():
        expected = {*OF_A, *OF_B} - ({"b3"} if starts == "a" else set())  # a was down when that came
        assert expected <= set(identities), recipient
        if starts != "b":  # where the former release had taken over the end first
            assert next(each for each in identities if each in ("a3", "a7")) == "a3", recipient
    raised = [*pair.a.raised, *pair.b.raised]
    assert "pair-set-back" not in raised
    if len(starts) == 2:
        assert len(pair.a.store) == 0
        assert len(pair.b.store) == len(pair.a.rig.later) == 1  # a reminder, due after this


def test_servers_are_upgraded_one_after_the_other(former: Former) -> None:
    """What was confirmed at either is not sent by the upgraded ones again, but for what was under way."""
    pair = former.pair
    pair.b.restart()
    pair.run(3)
    pair.a.restart()
    pair.run(5)
    for name, server in (("a", pair.a), ("b", pair.b)):
        for recipient in ("r", "s"):
            again = set(server.got[recipient]) & set(former.before[name][recipient])
            assert len(again) <= 2, (name, recipient, again)  # a batch
    assert order_of("b", former.got("s")) == OF_B
