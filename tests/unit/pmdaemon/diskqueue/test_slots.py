"""Numbers to slots against a dict, whatever comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.diskqueue.slots import NO_SLOT, PAGE, SlotMap

STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "skip", "remove")), st.integers(1, 3 * PAGE), st.integers(0, 10**6)),
    max_size=40,
)


@given(STEPS)
def test_it_is_a_dict_of_numbers_that_grow(steps: list[tuple[str, int, int]]) -> None:
    found, model, next_seq = SlotMap(), dict[int, int](), 1
    for what, count, place in steps:
        if what == "add":
            slots = list(range(place, place + count))
            found.add(next_seq, slots)
            model.update(zip(range(next_seq, next_seq + count), slots, strict=True))
            next_seq += count
        elif what == "skip":
            next_seq += count
        else:
            for seq in sorted(model)[place % 7 :: 1 + place % 3][:count]:
                found.remove(seq)
                del model[seq]
        assert len(found) == len(model)
    for seq in range(next_seq + 2):
        assert found.get(seq) == model.get(seq, NO_SLOT)
        assert (seq in found) == (seq in model)
    assert list(found.between(0, next_seq + PAGE)) == sorted(model.items())
    for first in (0, 1, next_seq // 2, next_seq):
        assert found.first(first, next_seq) == min((s for s in model if s >= first), default=next_seq)
        cut = {seq: slot for seq, slot in model.items() if first <= seq <= next_seq - 2}
        assert dict(found.between(first, next_seq - 2)) == cut


def test_what_is_not_there_is_removed_without_a_trace() -> None:
    found = SlotMap()
    found.add(5, (0,))
    found.remove(6)
    found.remove(5)
    found.remove(5)
    assert (len(found), found.pages) == (0, {})


def test_what_was_found_may_be_removed_while_looking_on() -> None:
    found, seen = SlotMap(), []
    found.add(1, list(range(3 * PAGE)))
    for seq, _slot in found.between(1, 3 * PAGE):
        found.remove(seq)
        seen.append(seq)
    assert seen == list(range(1, 3 * PAGE + 1))
    assert found.pages == {}
