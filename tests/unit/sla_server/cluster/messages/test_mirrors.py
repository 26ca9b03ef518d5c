"""Names of mirrors, how far they are behind, what may be trimmed, and what the words say."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any, Final, cast

import nats.js.errors
import pytest
from structlog.testing import capture_logs

from pmdaemon.runtime.clock import SystemClock
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind, keep_queue
from sla_server.cluster.messages.errors import BadName, MirrorRefused
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_records import (
    BUCKET,
    ConsumerRecord,
    MirrorRecord,
    consumers_of,
    observe,
)
from sla_server.cluster.messages.mirror_streams import (
    behind,
    holders_of,
    is_served,
    mirror_name,
    parts_of,
    refuse_mirror,
)
from sla_server.cluster.messages.mirrors import MirrorRow, add, floors, gaps, rows, sweep, trim
from sla_server.cluster.mirror_keeper import MirrorKeeper
from tests.support.mirrored import RECORD, FakeLink


@pytest.mark.parametrize("name", ["orders", "a.b_c", "_m", "a_mn1", "a__m", "x_", "SLA_orders_mn1"])
@pytest.mark.parametrize("node", ["n1", "m", "a-m", "9"])
def test_a_mirror_says_of_what_it_is_and_where_and_no_domain_has_such_a_name(name: str, node: str) -> None:
    stream = names.stream_name(name)
    assert parts_of(stream) is None
    assert parts_of(mirror_name(stream, node)) == (stream, node)


def test_what_cannot_be_a_mirror_is_refused() -> None:
    with pytest.raises(MirrorRefused, match="is a mirror itself, of SLA_orders"):
        mirror_name("SLA_orders_mn1", "n2")
    with pytest.raises(MirrorRefused, match="Make one of the destination"):
        refuse_mirror("SLA_orders_mn1")
    with pytest.raises(BadName, match="letters, digits and -"):
        mirror_name("SLA_orders", "n_1")
    with pytest.raises(BadName, match="255"):
        mirror_name(f"SLA_{'_d' * 100}", "n" * 60)
    assert parts_of("KV_SLA_MIRRORS") is None


def _state(first: int, last: int, messages: int, deleted: list[int] | None = None) -> dict[str, Any]:
    return {"first_seq": first, "last_seq": last, "messages": messages, "deleted": deleted}


@pytest.mark.parametrize(
    ("primary", "mirror", "expected"),
    [
        (_state(1, 100, 100), _state(0, 0, 0), 100),
        (_state(1, 100, 100), _state(1, 60, 60), 40),
        (_state(91, 100, 10), _state(1, 60, 60), 10),  # the others were acknowledged: nothing lacks them
        (_state(101, 100, 0), _state(1, 60, 60), 0),
        (_state(1, 100, 3), _state(1, 60, 60), 3),
        (_state(1, 100, 100), _state(1, 100, 100), 0),
        (_state(1, 99, 99), _state(1, 100, 100), 0),  # its answer is a moment older
    ],
)
def test_how_many_messages_a_mirror_lacks(primary: Any, mirror: Any, expected: int) -> None:
    assert behind(primary, mirror) == expected


def test_only_gaps_that_the_mirror_still_has_are_trimmed() -> None:
    assert gaps([2, 5, 6, 9, 12], _state(5, 10, 5, [6])) == [5, 9]
    assert gaps([], _state(1, 10, 10)) == []


def test_a_node_with_the_primary_or_a_backup_is_known_also_without_a_leader() -> None:
    cluster = {"leader": "n1", "replicas": [{"name": "n2"}, {"name": "n3", "offline": True}]}
    assert holders_of({"cluster": cluster}) == ("n1", "n2", "n3")
    assert holders_of({"cluster": {"replicas": [{"name": "n2"}]}}) == ("n2",)
    assert holders_of({}) == ()
    assert is_served({"config": {"subjects": ["sla.d.a.>"]}})
    assert not is_served({"config": {"subjects": ["sla.d.a.>"], "mirror": {"name": "SLA_a"}}})
    assert not is_served({"config": {}})


def test_a_mirror_says_that_it_is_asynchronous_and_how_far_behind() -> None:
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1")
    assert row.text == "asynchronous copy, does not run"
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True, hears_primary=True, behind_s=0.0)
    assert row.text == "asynchronous copy, 0 messages / 0 s behind"
    row = MirrorRow(
        "SLA_a_mn1", "SLA_a", "n1", is_running=True, hears_primary=True, behind_messages=1234, behind_s=61.4
    )
    assert row.text == "asynchronous copy, 1,234 messages / 61 s behind"
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True, behind_messages=7, behind_s=3600.0)
    assert row.text == (
        "asynchronous copy, its primary does not answer: 7 messages behind when it was heard of last, "
        "3,600 s ago"
    )
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True)
    assert "an unknown time ago" in row.text
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True, is_promoted=True)
    assert "promotion was begun" in row.text


def _trimmed(primary: Any, own: Any, **config: Any) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the engine beside questions; ``deleted`` counts."""
    link = _pair(primary, own, **config)
    asyncio.run(trim(cast(EngineLink, link), "SLA_a_mn1"))
    return link.changes()


def _pair(primary: Any, own: Any, **config: Any) -> FakeLink:
    """A primary and its mirror; of their messages only their first one can be asked."""
    link = FakeLink(
        {
            "STREAM.PURGE.SLA_a_mn1": {"purged": 3},
            "STREAM.MSG.DELETE.SLA_a_mn1": {"success": True},
            "STREAM.NAMES": {"streams": ["SLA_a", "SLA_a_mn1"], "total": 2},
            "CONSUMER.LIST.SLA_a": {"total": 0, "consumers": []},
        }
    )
    _become(link, primary, own, **config)
    return link


def _become(link: FakeLink, primary: Any, own: Any, own_time: str = "t1", **config: Any) -> None:
    for state in (primary, own):
        state |= {"num_deleted": len(state["deleted"] or ()), "bytes": 0}
    of_own = {"name": "SLA_a_mn1", "mirror": {"name": "SLA_a"}}
    shared = max(primary["first_seq"], own["first_seq"])
    link.answers |= {
        "STREAM.INFO.SLA_a": {
            "state": primary,
            "config": {"name": "SLA_a", "subjects": ["sla.d.a.>"]} | config,
        },
        "STREAM.INFO.SLA_a_mn1": {"state": own, "config": of_own, "created": "today"},
        "STREAM.MSG.GET.SLA_a": {"message": {"seq": shared, "time": "t1"}},
        "STREAM.MSG.GET.SLA_a_mn1": {"message": {"seq": shared, "time": own_time}},
    }


def test_what_the_primary_acknowledged_is_removed_from_the_mirror() -> None:
    assert _trimmed(_state(6, 9, 4), _state(1, 9, 9)) == [("STREAM.PURGE.SLA_a_mn1", {"seq": 6})]
    assert _trimmed(_state(1, 9, 7, [4, 5]), _state(1, 8, 7, [5])) == [
        ("STREAM.MSG.DELETE.SLA_a_mn1", {"seq": 4, "no_erase": True})
    ]


def test_a_mirror_is_not_emptied_after_a_primary_that_was_made_again_or_is_none() -> None:
    assert _trimmed(_state(0, 0, 0), _state(1, 9, 9)) == []
    assert _trimmed(_state(8, 8, 1), _state(1, 9, 9)) == []  # it has stored less than was copied from it
    assert _trimmed(_state(6, 9, 4), _state(1, 9, 9), mirror={"name": "SLA_a_mn1"}) == []
    assert _trimmed(_state(6, 9, 4), _state(1, 9, 9), subjects=[]) == []
    assert _trimmed(_state(6, 9, 4), _state(1, 9, 9), subjects=["sla.d.a._passed-over"]) == []


def test_a_queue_has_its_consumer_before_a_mirror_could_empty_it_and_a_topic_needs_none() -> None:
    link = FakeLink({"CONSUMER.DURABLE.CREATE.SLA_a.queue-a": {}})
    asyncio.run(keep_queue(cast(EngineLink, link), Destination("a")))
    [(subject, body)] = link.changes()
    assert subject == "CONSUMER.DURABLE.CREATE.SLA_a.queue-a"
    assert body["action"] == "create"
    assert body["config"]["filter_subject"] == "sla.d.a.a"
    link = FakeLink({"CONSUMER.INFO.SLA_a.queue-a": {}})
    asyncio.run(keep_queue(cast(EngineLink, link), Destination("a")))
    asyncio.run(keep_queue(cast(EngineLink, link), Destination("b", DestinationKind.TOPIC)))
    assert link.changes() == []


def test_destinations_of_the_cluster_itself_belong_to_no_domain_of_a_mirror() -> None:
    catalogue = Catalogue(cast(EngineLink, None), 3)
    for found in (Destination("a"), Destination("b", domain="a"), Destination("_DMQ"), Destination("c")):
        catalogue._add(found)  # as if it was read
    assert [found.name for found in catalogue.of_stream("SLA_a")] == ["a", "b"]
    assert catalogue.of_stream(Destination("_DMQ").stream) == []


def _consumer(name: str, subject: str, floor: int, policy: str = "explicit") -> dict[str, Any]:
    config = {"filter_subject": subject, "ack_policy": policy}
    return {"name": name, "config": config, "ack_floor": {"stream_seq": floor}}


def test_what_all_consumers_of_a_subject_have_acknowledged_is_kept_for_no_mirror() -> None:
    own = [("a", 7), ("a", 5), ("b", 9), ("c", 0), ("c", 9)]
    found = [_consumer(str(number), *each) for number, each in enumerate(own)]
    copier = _consumer("JS_MIRROR_x", "", 0, "flow_control")
    assert floors([*found, copier]) == {"a": 5, "b": 9}
    # Consumers that a program has made without the library want it, too.
    assert floors([*found, copier, _consumer("all", "b", 3, "all")]) == {"a": 5, "b": 3}
    several = _consumer("several", "", 6)
    several["config"] = {"filter_subjects": ["a", "b"], "ack_policy": "explicit"}
    for wide in (several, _consumer("wide", "*", 6), _consumer("wide", ">", 6)):
        assert floors([*found, wide]) == {"a": 5, "b": 6}
    assert floors([*found, _consumer("wide", "", 0)]) == {}


class PagedLink:
    """Answers CONSUMER.LIST in pages as the engine does."""

    def __init__(self, names: list[str], page: int = 256, **more: Any) -> None:
        self.names = names
        self.page = page
        self.more = more

    async def ask(self, _subject: str, body: dict[str, Any]) -> dict[str, Any]:
        found = self.names[body["offset"] :][: self.page]
        consumers = [_consumer(name, "a", 1) for name in found]
        return {"total": len(self.names), "consumers": consumers, **self.more}


def test_all_pages_of_consumers_count_and_none_is_taken_for_absent_that_does_not_answer() -> None:
    def listed(link: PagedLink) -> list[str] | None:
        found = asyncio.run(consumers_of(cast(EngineLink, link), "SLA_a"))
        return None if found is None else [part["name"] for part in found]

    names = [f"c{number:03}" for number in range(600)]
    assert listed(PagedLink(names)) == names
    assert listed(PagedLink([])) == []
    assert listed(PagedLink(names, missing=["c601"])) is None
    assert listed(PagedLink(names, offline={"c601": "of a later release"})) is None

    class Leaving(PagedLink):
        async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await super().ask(subject, body)
            del self.names[:1]  # so that the next page leaves one out
            return answer

    assert listed(Leaving(list(names))) is None


def test_nothing_is_swept_while_a_consumer_does_not_answer() -> None:
    config = {"config": {"subjects": ["sla.d.a.>"]}}
    listing = {"total": 1, "consumers": [_consumer("c", "sla.d.a.a", 5)], "missing": ["d"]}
    link = FakeLink({"STREAM.INFO.SLA_a": config, "CONSUMER.LIST.SLA_a": listing})
    assert asyncio.run(sweep(cast(EngineLink, link), "SLA_a")) == 0
    assert [subject for subject, _ in link.changes()] == ["CONSUMER.LIST.SLA_a"]


def test_a_primary_that_has_stored_less_than_its_mirror_is_no_proof_that_it_has_all() -> None:
    """Its disk was lost: what is stored there now has numbers that the mirror never asks for."""
    link = _pair(_state(1, 3, 3), _state(1, 9, 9))
    [row] = asyncio.run(rows(cast(EngineLink, link), SystemClock()))
    assert (row.is_ahead, row.hears_primary, row.behind_messages, row.behind_s) == (True, True, 3, None)
    assert "its primary was lost or set back, and has stored less than this has" in row.text
    # Without a record nothing is known of what was lost, and none is made of what is there now.
    found = asyncio.run(observe(cast(EngineLink, link), "SLA_a_mn1", SystemClock()))
    assert found is not None
    assert found.is_set_back
    assert RECORD not in link.answers


BEFORE: Final = MirrorRecord(7, 9, 9, 9, (ConsumerRecord("s-a", "sla.d.a.a", 4),))


@pytest.mark.parametrize("call", ["trim", "observe"])
def test_what_only_the_mirror_has_stays_when_a_primary_that_was_emptied_has_grown_past_it(call: str) -> None:
    """Seen once, it is in the record, as it was: a later release and a restart know it, too."""
    link = _pair(_state(1, 3, 3), _state(1, 9, 9))
    link.record(BEFORE.encode())
    engine = cast(EngineLink, link)

    def seen() -> MirrorRecord | None:
        return asyncio.run(observe(engine, "SLA_a_mn1", SystemClock()))

    if call == "trim":
        assert asyncio.run(trim(engine, "SLA_a_mn1")) == 0
    else:
        assert seen() == link.seen
    marked = dataclasses.replace(BEFORE, is_set_back=True, mirror_created="today")
    assert link.seen == marked

    _become(link, _state(8, 20, 13), _state(1, 20, 20))
    assert asyncio.run(trim(engine, "SLA_a_mn1")) == 0
    assert seen() == link.seen == marked
    assert link.changes() == []
    [row] = asyncio.run(rows(engine, SystemClock()))
    assert (row.is_ahead, row.behind_messages) == (True, 0)
    assert "nothing is removed here any more" in row.text
    link.answers["STREAM.INFO.SLA_a"] = nats.js.errors.NotFoundError(code=404, err_code=10059)
    [row] = asyncio.run(rows(engine, SystemClock()))
    assert row.is_ahead  # also while the primary does not answer

    # Another mirror of that name has nothing to do with it.
    _become(link, _state(8, 20, 13), _state(1, 20, 20))
    link.answers["STREAM.INFO.SLA_a_mn1"]["created"] = "tomorrow"
    assert not asyncio.run(rows(engine, SystemClock()))[0].is_ahead
    assert asyncio.run(trim(engine, "SLA_a_mn1")) == 3
    found = seen()
    assert found is not None
    assert not found.is_set_back


def test_its_node_says_once_that_a_primary_was_set_back_and_still_keeps_queues() -> None:
    link = _pair(_state(1, 3, 3), _state(1, 9, 9))
    link.record(BEFORE.encode())
    link.answers |= {
        f"STREAM.INFO.KV_{BUCKET}": {"state": {"subjects": {f"$KV.{BUCKET}.SLA_a_mn1": 1}}},
        "CONSUMER.DURABLE.CREATE.SLA_a.queue-a": {},
    }
    engine = cast(EngineLink, link)
    catalogue = Catalogue(engine, 3)
    catalogue._add(Destination("a"))  # as if it was read
    catalogue.refresh = link.nothing  # type: ignore[method-assign]
    keeper = MirrorKeeper("n1", 3, SystemClock())
    with capture_logs() as logged:
        for _ in range(2):
            assert asyncio.run(keeper.round(engine, catalogue, set())) == 1
    assert [line["event"] for line in logged] == ["mirror-kept", "mirror-primary-set-back"]
    made = "CONSUMER.DURABLE.CREATE.SLA_a.queue-a"
    assert [subject for subject, _ in link.changes()] == [made, made]
    assert link.seen.is_set_back


def test_one_mirror_that_fails_keeps_none_of_the_others_from_being_looked_after() -> None:
    """Its turn comes first each time; without theirs the others would neither be trimmed nor recorded."""
    link = _pair(_state(6, 9, 4), _state(1, 9, 9))
    listed = {f"$KV.{BUCKET}.{name}": 1 for name in ("SLA_0_mn1", "SLA_a_mn1")}
    link.answers |= {
        f"STREAM.INFO.KV_{BUCKET}": {"state": {"subjects": listed}},
        "STREAM.INFO.SLA_0_mn1": nats.js.errors.APIError(code=400, err_code=10003),
    }
    engine = cast(EngineLink, link)
    catalogue = Catalogue(engine, 3)
    catalogue.refresh = link.nothing  # type: ignore[method-assign]
    keeper = MirrorKeeper("n1", 3, SystemClock())
    with capture_logs() as logged:
        for _ in range(2):
            with pytest.raises(nats.js.errors.APIError):
                asyncio.run(keeper.round(engine, catalogue, set()))
    assert [line["event"] for line in logged] == ["mirror-round-failed", "mirror-kept"]
    purge = ("STREAM.PURGE.SLA_a_mn1", {"seq": 6})
    assert [change for change in link.changes() if change[0].startswith("STREAM.PURGE")] == [purge, purge]
    assert link.seen.primary_last == 9


def test_a_primary_with_another_message_under_a_sequence_of_the_mirror_was_set_back() -> None:
    """It was emptied and has grown past the mirror between two looks."""
    link = _pair(_state(6, 20, 15), _state(1, 20, 20))
    link.record(BEFORE.encode())
    link.answers["STREAM.MSG.GET.SLA_a_mn1"]["message"]["time"] = "t0"
    assert asyncio.run(trim(cast(EngineLink, link), "SLA_a_mn1")) == 0
    assert link.changes() == []
    assert link.seen.is_set_back
    # One that cannot be compared now proves nothing.
    link = _pair(_state(6, 20, 15), _state(1, 20, 20))
    link.record(BEFORE.encode())
    del link.answers["STREAM.MSG.GET.SLA_a_mn1"]
    assert asyncio.run(trim(cast(EngineLink, link), "SLA_a_mn1")) == 0
    assert link.changes() == []
    assert link.seen == BEFORE


def test_a_primary_that_seems_to_be_set_back_for_a_moment_is_not() -> None:
    """A node that has just been elected may not have come to its end."""

    class Elected(FakeLink):
        async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await super().ask(subject, body)
            if subject == "STREAM.INFO.SLA_a":  # it is what comes after the mirror's
                _become(self, _state(6, 9, 4), _state(1, 9, 9))
            return answer

    link = Elected(_pair(_state(1, 3, 3), _state(1, 9, 9)).answers)
    link.record(BEFORE.encode())
    assert asyncio.run(trim(cast(EngineLink, link), "SLA_a_mn1")) == 3
    assert link.seen == BEFORE


def test_a_primary_that_is_being_promoted_of_another_mirror_is_not_taken_for_one_that_was_set_back() -> None:
    """Until its sequences are passed over it may have fewer than one that was behind the promoted one."""
    link = _pair(_state(1, 8, 8), _state(1, 9, 9), subjects=["sla.d.a._passed-over"])
    link.record(BEFORE.encode())
    assert asyncio.run(observe(cast(EngineLink, link), "SLA_a_mn1", SystemClock())) is None
    assert link.seen == BEFORE
    assert not asyncio.run(rows(cast(EngineLink, link), SystemClock()))[0].is_ahead


def test_a_record_is_not_written_over_one_that_another_process_has_written_meanwhile() -> None:
    link = _pair(_state(1, 9, 9), _state(1, 9, 9))
    link.record(BEFORE.encode())
    original = link.key_value

    async def overtaken(bucket: str) -> FakeLink:
        link.record(dataclasses.replace(BEFORE, is_set_back=True).encode())
        return await original(bucket)

    link.key_value = overtaken  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="written by another one"):
        asyncio.run(observe(cast(EngineLink, link), "SLA_a_mn1", SystemClock()))
    assert link.seen.is_set_back


def test_a_record_of_an_earlier_release_is_read_and_one_of_this_comes_back_whole() -> None:
    marked = dataclasses.replace(BEFORE, is_set_back=True, mirror_created="today")
    assert MirrorRecord.parse(marked.encode()) == marked
    fields = json.loads(BEFORE.encode())
    del fields["is_set_back"], fields["mirror_created"]
    assert MirrorRecord.parse(json.dumps(fields).encode()) == BEFORE


def test_a_mirror_is_not_made_before_it_has_a_record() -> None:
    """Without one no node looks after it: it would be trimmed by none, and keep what is acknowledged."""
    link = _pair(_state(1, 9, 9), _state(1, 9, 9))
    listing = link.answers["CONSUMER.LIST.SLA_a"]
    link.answers |= {
        "CONSUMER.LIST.SLA_a": {**listing, "missing": ["queue-a"]},
        "CONSUMER.INFO.SLA_a.queue-a": {},
    }
    catalogue = Catalogue(cast(EngineLink, link), 3)
    catalogue._add(Destination("a"))  # as if it was read
    catalogue.refresh = link.nothing  # type: ignore[method-assign]

    def made() -> str:
        return asyncio.run(add(cast(EngineLink, link), catalogue, "a", "n1", SystemClock()))

    with pytest.raises(TimeoutError, match="does not answer"):
        made()  # which ``retry`` repeats
    assert RECORD not in link.answers
    link.answers["CONSUMER.LIST.SLA_a"] = listing
    assert made() == "SLA_a_mn1"
    assert (link.seen.primary_last, link.seen.mirror_last) == (9, 9)
    # Nor is one taken for good whose primary was set back.
    _become(link, _state(1, 3, 3), _state(1, 9, 9))
    with pytest.raises(MirrorRefused, match="sla cluster mirror remove a --node n1"):
        made()


def test_a_destination_whose_mirror_is_being_promoted_is_not_made_again_empty() -> None:
    class Streams:
        async def stream_info(self, _name: str) -> None:
            raise nats.js.errors.NotFoundError(code=404, err_code=10059)

    link: Any = FakeLink({"STREAM.NAMES": {"streams": ["SLA_b_mn1", "SLA_a_mn1"], "total": 2}})
    link.stream = Streams()
    catalogue = Catalogue(cast(EngineLink, link), 3)
    with pytest.raises(TimeoutError, match="it has a mirror"):
        asyncio.run(catalogue._make_stream(Destination("a")))  # what ``create`` repeats
