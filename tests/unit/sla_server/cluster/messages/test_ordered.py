"""Order within a key, none of two tasks of a key at once, and no key waits for a busy one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sla_server.cluster.messages.ordered import KeyedQueue


@given(
    st.lists(
        st.one_of(st.tuples(st.just("add"), st.integers(0, 3)), st.tuples(st.just("end"), st.integers(0, 3)))
    )
)
def test_any_history(history: list[tuple[str, int]]) -> None:
    queue = KeyedQueue()
    ran: list[tuple[int, int]] = []
    added: list[tuple[int, int]] = []
    running: list[object] = []

    def start_all() -> None:
        while (found := queue.next()) is not None:
            key, task = found
            assert key not in running
            running.append(key)
            task()

    for number, (what, key) in enumerate(history):
        if what == "add":
            added.append((key, number))
            queue.add(key, lambda pair=(key, number): ran.append(pair))  # type: ignore[misc]
        elif running:
            queue.done(running.pop(key % len(running)))
        start_all()
    while running:
        queue.done(running.pop(0))
        start_all()
    assert sorted(ran) == sorted(added)
    for key in range(4):
        assert [pair for pair in ran if pair[0] == key] == [pair for pair in added if pair[0] == key]


def test_a_busy_key_goes_behind_the_others() -> None:
    queue = KeyedQueue()
    ran: list[str] = []
    for key in ("a", "a", "b"):
        queue.add(key, lambda key=key: ran.append(key))  # type: ignore[misc]
    for _ in range(3):
        found = queue.next()
        assert found is not None
        found[1]()
        queue.done(found[0])
    assert ran == ["a", "b", "a"]
