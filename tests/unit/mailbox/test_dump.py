import os
from pathlib import Path

from pmdaemon.mailbox import attach, describe
from tests.unit.mailbox.support import make_mesh


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
