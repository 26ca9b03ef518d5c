import os
from pathlib import Path

from pmdaemon.mailbox import Layout, Route, attach, create_segment, describe
from tests.support.mailbox import make_mesh


def test_a_segment_is_described_without_touching_it(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post(("b", "c"), b"x" * 256)
        a.post("b", b"x" * 256)
        b.take(1)
        assert b.take() != []
        assert b.prepare_sleep()
        before = path.read_bytes()
        told = describe(path)
        assert path.read_bytes() == before
    assert told["owner"] == {"pid": os.getpid(), "alive": True}
    people = {entry["name"]: entry for entry in told["participants"]}
    assert people["a"]["attached"]
    assert people["a"]["posted_sequence"] == 2
    assert people["b"]["sleeping"]
    assert (people["b"]["takes"], people["b"]["slots_inspected"], people["b"]["inspected_per_take"]) == (
        2,
        3,
        1.5,
    )
    assert people["b"]["in_hand"] == 0
    assert people["a"]["slots"] == {"free": 29, "ready": 1, "taken": 2, "damaged": 0}
    assert not people["c"]["attached"]
    routes = {(entry["sender"], entry["recipient"]): entry for entry in told["routes"]}
    assert routes["a", "b"]["messages"] == 0
    assert routes["a", "c"] == {
        "sender": "a",
        "recipient": "c",
        "ring_bytes": 1024,
        "messages": 1,
        "bytes": 256,
        "fill_ratio": 0.25,
    }
    assert told["lanes"][0] == {"sender": "a", "linked": 3, "moving": False, "waiting": {"c": [1, 256]}}


def test_a_damaged_lane_is_told_not_followed(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a:
        a.post("b", b"x")
        for reference in (1, 999, 7 << 32 | 1):
            a._words[a._writer._next_word[0]] = reference
            assert describe(path)["lanes"][0]["moving"]


def test_the_shared_list_is_told_by_sender(path: Path) -> None:
    create_segment(path, Layout(("a", "b"), (Route("a", "b", 1024), Route("b", "a", 1024)), 8, "shared"))
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"xyz")
        b.post("a", b"12345")
        told = describe(path)
        a._words[a._segment.layout.list_word + 12] = 1
        assert describe(path)["repair_pending"]
    assert told["form"] == "shared"
    assert not told["repair_pending"]
    assert told["lanes"] == [
        {"sender": "a", "linked": 1, "moving": False, "waiting": {"b": [1, 3]}},
        {"sender": "b", "linked": 1, "moving": False, "waiting": {"a": [1, 5]}},
    ]
    assert [route["messages"] for route in told["routes"]] == [1, 1]
