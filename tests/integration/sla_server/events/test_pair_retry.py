"""A pair whose disk had failed is opened again without a restart; delivery goes on meanwhile."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.clock import server_clock
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events import pair, pair_history
from sla_server.events.catalogue import PAGE
from sla_server.events.config import EventPairConfig, EventsConfig
from sla_server.events.delivery import Delivery
from sla_server.events.pair_core import PairCore
from sla_server.events.pair_link import PairLink
from sla_server.events.pair_store import MirrorStore
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.config import NotifyConfig
from tests.support.deliveries import event
from tests.support.ports import free_port

LIMIT_S = 180.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pair, "RETRY_FIRST_S", 0.0)
    for name in ("run", "events/reserve", "notices", "pair"):
        (tmp_path / name).mkdir(parents=True, mode=0o700)
    authority = Authority(tmp_path / "ca")
    authority.init()
    (tmp_path / "pair" / "pair.pem").write_bytes(authority.partner_credential("a", 86_400.0))
    (tmp_path / "pair" / "ca.crt").write_bytes(authority.store.read("ca.crt"))
    return tmp_path


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    kinds: list[str] = []
    monkeypatch.setattr(pair, "raise_event", lambda row: kinds.append(row["kind"]))
    return kinds


@pytest.fixture
def config(folder: Path) -> SimpleNamespace:
    partner = EventPairConfig(
        enabled=True,
        name="a",
        partner="b",
        listen=f"127.0.0.1:{free_port()}",
        address=f"127.0.0.1:{free_port()}",
        mirror_bytes=1 << 20,
    )
    events = EventsConfig(pair=partner, queue_bytes=16 << 20)
    return SimpleNamespace(
        data_dir=folder, runtime_dir=folder / "run", notify=NotifyConfig(), events=events, runbook_url=PAGE
    )


def opened(config: SimpleNamespace) -> Iterator[Delivery]:
    threads = [ThreadGroup(lambda name, exc: pytest.fail(f"{name}: {exc}")) for _ in range(2)]
    delivery = Delivery(config, config.data_dir / "events", threads[0], threads[1], server_clock())
    try:
        yield delivery
    finally:
        delivery.close()


def wait_for_port(delivery: Delivery) -> None:
    deadline = time.monotonic() + LIMIT_S
    while delivery._pair is None or not delivery._pair.port:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_store_that_could_not_be_opened_at_the_start_is_tried_again(
    config: SimpleNamespace, raised: list[str]
) -> None:
    obstacle = config.data_dir / "events" / "partner"
    obstacle.mkdir()
    for delivery in opened(config):
        assert delivery._pair is None
        delivery._mend_pair()  # the obstacle is still there
        assert delivery._pair is None
        assert raised.count("pair-failed") == 2
        obstacle.rmdir()
        deadline = time.monotonic() + LIMIT_S
        while delivery._pair is None:
            assert time.monotonic() < deadline
            delivery._mend_pair()
        wait_for_port(delivery)
        assert raised.count("pair-failed") == 2


def test_an_opening_is_on_disk_before_an_event_also_of_a_pair_that_cannot_be_opened(
    config: SimpleNamespace, raised: list[str]
) -> None:
    directory = config.data_dir / "events"
    (directory / "partner").mkdir()

    def newest(queue_id: str) -> list[int]:
        openings = json.loads((directory / pair_history.FILE).read_bytes())["openings"]
        return [found[queue_id] for _, found in openings]

    for delivery in opened(config):
        main, _ = delivery.queues
        assert newest(main.queue_id) == [0]
        main.append([QueuedEvent(event(1))])
    for delivery in opened(config):
        main, _ = delivery.queues
        assert newest(main.queue_id) == [0, 1]
    assert "pair-failed" in raised
    config.events = EventsConfig(queue_bytes=16 << 20)
    for _ in opened(config):
        assert not (directory / pair_history.FILE).exists()


@pytest.fixture
def failed(config: SimpleNamespace, raised: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Delivery]:
    """Its pair's thread has ended."""

    def fails(*_arguments: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(PairLink, "run", fails)
        found = opened(config)
        delivery = next(found)
        assert delivery._pair is not None
        delivery._pair.start()
        deadline = time.monotonic() + LIMIT_S
        while not delivery._pair.problem:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert "pair-failed" in raised
    yield delivery
    assert next(found, None) is None


def test_a_pair_whose_thread_ended_is_opened_again(failed: Delivery) -> None:
    former = failed._pair
    failed._mend_pair()
    assert failed._pair is not former
    wait_for_port(failed)
    well = failed._pair
    failed._mend_pair()  # nothing to mend
    assert failed._pair is well


def test_what_was_delivered_for_the_partner_meanwhile_is_known_afterwards(failed: Delivery) -> None:
    former, item = failed._pair, QueuedEvent(event(1), origin="0" * 16, origin_seq=3)
    assert former is not None
    former._threads.join(LIMIT_S)
    former._ledger.take([item])
    row = {"event_id": "e1", "recipient": "oncall", "delivery_id": item.identity, "state": "confirmed"}
    former.report([row])
    failed._mend_pair()
    assert failed._pair is not None
    assert failed._pair._ledger.delivered() == {"oncall": [item.identity]}


def test_a_pair_whose_thread_hangs_is_opened_again_when_it_has_ended(
    failed: Delivery, raised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "JOIN_S", 0.01)
    former, may_end = failed._pair, threading.Event()
    assert former is not None
    former._threads.start("ev-pair", may_end.wait)
    failed._mend_pair()
    assert failed._pair is former  # it has the files
    may_end.set()
    former._threads.join(LIMIT_S)
    failed._mend_pair()
    assert failed._pair is not former
    wait_for_port(failed)
    assert raised.count("pair-failed") == 1


@pytest.mark.parametrize("where", [PairLink, PairCore, MirrorStore], ids=["descriptors", "core", "store"])
def test_what_fails_while_a_pair_is_opened_keeps_no_lock_on_its_store(
    config: SimpleNamespace, raised: list[str], monkeypatch: pytest.MonkeyPatch, where: type
) -> None:
    def fails(*_arguments: object, **_named: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(where, "_load" if where is MirrorStore else "__init__", fails)
        found = opened(config)
        delivery = next(found)
    assert delivery._pair is None
    delivery._mend_pair()
    wait_for_port(delivery)
    assert raised.count("pair-failed") == 1
    assert next(found, None) is None
