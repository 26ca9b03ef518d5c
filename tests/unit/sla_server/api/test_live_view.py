from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest

from pmdaemon.runtime.clock import FakeClock
from sla_server.api.errors import TooManyStreams
from sla_server.api.handlers.live import EventStream
from sla_server.api.live_view import TREND_POINTS, LiveView
from tests.support.api import NOW_US, snapshot


@pytest.fixture
def view(clock: FakeClock) -> LiveView:
    return LiveView(clock, streams_max=2, stale_after_s=5.0)


def test_before_the_first_snapshot_everything_is_empty_and_stale(view: LiveView) -> None:
    assert view.newest().number == 0
    assert view.newest().snapshot["slas"] == []
    assert view.age_s() is None
    assert view.is_stale()


def test_the_newest_snapshot_and_its_age(view: LiveView, clock: FakeClock) -> None:
    view.put(snapshot(NOW_US))
    view.put(snapshot(NOW_US + 2))
    assert view.newest().number == 2
    assert json.loads(view.newest().json_text)["at_us"] == NOW_US + 2
    clock.advance(5.0)
    assert view.age_s() == 5.0
    assert not view.is_stale()
    clock.advance(0.1)
    assert view.is_stale()


@pytest.mark.parametrize("bad", [{}, {"at_us": "1"}, {"at_us": 1, "slas": {}}])
def test_a_malformed_snapshot_changes_nothing(view: LiveView, bad: dict[str, object]) -> None:
    view.put(snapshot(1))
    with pytest.raises(ValueError, match="snapshot"):
        view.put(bad)
    assert view.newest().number == 1


def test_a_bad_row_is_dropped_alone_and_a_value_without_a_form_is_replaced(view: LiveView) -> None:
    good = {"event_id": "e1", "details": {"n": math.nan, "b": b"x", 5: [math.inf]}, "at_us": 1 << 62}
    odd: list[Any] = [{"name": [1], "objective": {}, "state": ["x"]}]
    view.put(
        {**snapshot(1), "events": [3, good, None], "slas": odd, "throttles": [{"state": [1], "victim": 5}]}
    )
    newest = view.newest()
    assert newest.number == 1

    def refuse(name: str) -> None:
        raise AssertionError(name)

    shown = json.loads(newest.json_text, parse_constant=refuse)
    assert shown["events"] == [
        {"event_id": "e1", "details": {"n": None, "b": "b'x'", "5": [None]}, "at_us": 1 << 62}
    ]
    assert view.trend()["at_us"] == [1]


def test_a_snapshot_that_waited_in_the_mailbox_is_as_old_as_it_says(view: LiveView, clock: FakeClock) -> None:
    """The page is started again, services have been gone for long: what was so then is not so now."""
    view.put(snapshot(NOW_US - 600_000_000))
    assert (view.age_s(), view.is_stale()) == (600.0, True)
    view.put(snapshot(NOW_US + 1_000_000))
    assert (view.age_s(), view.is_stale()) == (0.0, False), "a clock that is ahead makes nothing younger"
    clock.advance(5.1)
    assert view.is_stale()


def test_states_of_the_others_are_kept_and_sent_to_no_page(view: LiveView) -> None:
    totals = {"slas": {"ok": 9}}
    first = {**snapshot(), "slas": [], "totals": totals}
    view.put({**first, "others": [["a", "x", "ok", 0.9, 1.0, 0.5], ["b", "x", "idle"], 7]})
    view.put({**first, "others": [["c", "x", "no-data", None, None, None]]})
    assert {key: row["state"] for key, row in view.others().items()} == {
        ("a", "x"): "ok",
        ("c", "x"): "no-data",
    }
    assert "others" not in json.loads(view.newest().json_text)
    view.put({**first, "totals": {"slas": {}}})
    assert view.others() == {}, "none of them is promised any more"


def test_the_trend_of_a_promise_is_of_what_its_limit_is_compared_with(view: LiveView) -> None:
    rows = [
        {"name": "a", "objective": "stall", "metric": "availability", "latency_us": 900, "stall_us": 40},
        {"name": "a", "objective": "mean", "metric": "mean_latency", "latency_us": None, "measured": 50.5},
        {"name": "a", "objective": "rate", "metric": "iops", "latency_us": None, "measured": 1000.0},
    ]
    view.put(snapshot(1, slas=rows))
    values = {key: columns["latency_us"] for key, columns in view.trend()["slas"].items()}
    assert values == {"a/stall": [40], "a/mean": [50.5], "a/rate": [None]}


def test_missing_lists_are_empty(view: LiveView) -> None:
    view.put({"at_us": 7, "mode": "observe"})
    assert view.newest().snapshot["throttles"] == []


def test_trend_marks_who_is_helped_by_a_throttle(view: LiveView) -> None:
    view.put(snapshot(NOW_US, throttles=[]))
    view.put(snapshot(NOW_US + 1))
    observed = [{**snapshot()["throttles"][0], "state": "observed"}]
    view.put(snapshot(NOW_US + 2, throttles=observed))
    trend = view.trend()
    assert trend["at_us"] == [NOW_US, NOW_US + 1, NOW_US + 2]
    assert trend["slas"]["erp-gold/latency"]["throttled"] == [False, True, False]
    assert trend["slas"]["reports/latency"]["throttled"] == [False, False, False]
    assert trend["slas"]["scratch/latency"]["latency_us"] == [None, None, None]


def test_trend_marks_all_whom_the_loop_of_a_backend_helps(view: LiveView) -> None:
    both = [{"backend": "disk-0", "victims": ["erp-gold/latency", "reports/latency"]}]
    view.put(snapshot(NOW_US, backends=both))
    by_hand = [{**snapshot()["throttles"][0], "source": "manual", "victim": ""}]
    view.put(snapshot(NOW_US + 1, backends=both, throttles=by_hand))
    trend = view.trend()["slas"]
    assert trend["erp-gold/latency"]["throttled"] == [True, False]
    assert trend["reports/latency"]["throttled"] == [True, False]
    assert trend["scratch/latency"]["throttled"] == [False, False]


def test_an_objective_that_comes_later_has_nulls_before(view: LiveView) -> None:
    view.put(snapshot(1, slas=[]))
    view.put(snapshot(2))
    assert view.trend()["slas"]["erp-gold/latency"]["latency_us"] == [None, 9_200]


def test_a_state_is_dated_from_the_change_that_was_seen(view: LiveView) -> None:
    row = snapshot()["slas"][0]
    key = (row["name"], row["objective"])

    def since(at_us: int, state: str) -> int | None:
        view.put(snapshot(NOW_US + at_us, slas=[{**row, "state": state}], totals={"slas": {state: 1}}))
        found: int | None = view.others()[key]["since_us"]
        return found and found - NOW_US

    assert since(1, "ok") is None, "it may have been so for long"
    assert [since(2, "ok"), since(3, "violating"), since(4, "violating"), since(5, "ok")] == [None, 3, 3, 5]


def test_the_trend_is_bounded(view: LiveView) -> None:
    for at_us in range(1, TREND_POINTS + 11):
        view.put({"at_us": at_us})
    assert view.trend()["at_us"] == list(range(11, TREND_POINTS + 11))


def test_places_are_limited_and_given_back_once(view: LiveView) -> None:
    first, _second = view.take_place(), view.take_place()
    with pytest.raises(TooManyStreams) as caught:
        view.take_place()
    assert caught.value.retry_after_s
    first.release()
    first.release()
    assert view.streams == 1
    view.take_place()
    with pytest.raises(TooManyStreams):
        view.take_place()


def test_waiting_ends_with_a_snapshot_or_the_close(view: LiveView) -> None:
    view.put(snapshot(1))
    found = view.wait_newer(0, 10.0)
    assert found is not None
    assert found.number == 1
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(view.wait_newer(1, 10.0)))
    thread.start()
    view.close()
    thread.join(60)
    assert seen == [None]


def test_a_stream_begins_with_what_is_known_and_ends_with_the_view(view: LiveView) -> None:
    view.put(snapshot(41))
    stream = EventStream(view, view.take_place())
    first = next(stream)
    assert first.startswith("retry: 2000\n\nevent: snapshot\nid: 41\ndata: {")
    assert first.endswith("\n\n")
    view.put(snapshot(42))
    assert "id: 42" in next(stream)
    view.close()
    assert list(stream) == []
    stream.close()
    assert view.streams == 0
