"""The spool against a plain list, torn and damaged files, bounds and gaps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_agent.link import segment
from gateway_agent.link.errors import SpoolUnusable, SpoolWriteFailed
from gateway_agent.link.spool import MAX_EPOCHS, Spool
from pmdaemon.wire import cut
from tests.unit.gateway_link.link_support import GATEWAY

BIG = 64 << 20


def raw_cut(epoch: int, seq: int, reads: int = 1, marks: dict | None = None) -> bytes:
    row = [reads if name == "reads" else 0 for name in cut.COLUMNS]
    empty = cut.HIST_DTYPE, cut.MISSED_DTYPE
    hist, missed = (cut.np.zeros(0, dtype=dtype) for dtype in empty)
    one = cut.Cut(
        GATEWAY, epoch, seq, 1, 2, 0, 0, cut.rows_array([row]), hist, missed, extra={"dp": marks or {}}
    )
    return cut.encode(one)


def put(spool: Spool, epoch: int, seq: int, marks: dict | None = None) -> int:
    return spool.append(epoch, seq, raw_cut(epoch, seq, marks=marks), marks or {})


def keys(spool: Spool, start=None) -> list[tuple[int, int]]:
    return [(item.epoch, item.seq) for item in spool.read_from(start)]


def gaps(spool: Spool) -> dict[tuple[int, int], int]:
    found = {(item.epoch, item.seq): cut.decode(item.raw).gap for item in spool.read_from(None)}
    return {key: gap for key, gap in found.items() if gap}


def test_what_is_appended_is_read_until_forgotten(tmp_path):
    spool = Spool(tmp_path, BIG)
    for seq in (1, 2, 3):
        put(spool, 7, seq)
    assert keys(spool, (7, 2)) == [(7, 2), (7, 3)]
    spool.forget(7, 2)
    assert keys(spool) == [(7, 3)]
    assert spool.epochs() == [[7, 3, 3]]
    spool.forget(7, 99)
    spool.forget(8, 1)
    assert (keys(spool), spool.epochs()) == ([], [])
    assert spool.newest().seq == 3


def test_reading_starts_at_the_oldest_when_the_epoch_is_unknown(tmp_path):
    spool = Spool(tmp_path, BIG)
    put(spool, 7, 1)
    put(spool, 8, 1)
    assert keys(spool, (99, 5)) == [(7, 1), (8, 1)]
    assert keys(spool, (7, 2)) == [(8, 1)]
    assert keys(spool, (8, 2)) == []


def test_marks_are_those_of_the_newest_cut_also_after_it_was_acknowledged(tmp_path):
    spool = Spool(tmp_path, BIG)
    put(spool, 7, 1, {"nbd-0": 5})
    put(spool, 7, 2, {"nbd-0": 6})
    spool.forget(7, 2)
    spool.close()
    again = Spool(tmp_path, BIG)
    assert again.marks == {"nbd-0": 6}


def test_a_segment_is_deleted_when_all_its_cuts_are_forgotten(tmp_path):
    spool = Spool(tmp_path, 32_000)  # 2,000 bytes a segment
    for seq in range(1, 21):
        put(spool, 7, seq)
    assert len(segment.numbers(tmp_path)) > 2
    spool.forget(7, 20)
    assert len(segment.numbers(tmp_path)) == 1


def test_overflow_drops_the_oldest_and_the_next_cut_says_how_many(tmp_path):
    spool = Spool(tmp_path, 16_000)
    dropped = sum(put(spool, 7, seq) for seq in range(1, 101))
    first = spool.epochs()[0][1]
    assert dropped == spool.dropped == first - 1 > 0
    assert gaps(spool) == {(7, first): dropped}
    assert spool.size_bytes <= 16_000
    spool.close()
    again = Spool(tmp_path, 16_000)
    assert (again.dropped, gaps(again)) == (dropped, {(7, first): dropped})


def test_acknowledged_cuts_are_not_counted_as_dropped(tmp_path):
    spool = Spool(tmp_path, 16_000)
    for seq in range(1, 101):
        put(spool, 7, seq)
        spool.forget(7, seq - 1)
    assert (spool.dropped, gaps(spool)) == (0, {})


def test_gaps_of_two_overflows_around_a_delivery_are_counted_apart(tmp_path):
    spool = Spool(tmp_path, 16_000)
    for seq in range(1, 101):
        put(spool, 7, seq)
    first_gap = spool.dropped
    spool.forget(7, spool.epochs()[0][1])  # the cut that carried the gap arrived
    assert gaps(spool) == {}
    for seq in range(101, 201):
        put(spool, 7, seq)
    assert sum(gaps(spool).values()) == spool.dropped - first_gap


@pytest.mark.parametrize("crash_before", ["count", "delete"])
def test_dying_while_dropping_counts_once(tmp_path, monkeypatch, crash_before):
    spool = Spool(tmp_path, 16_000)
    seq = 1
    while not spool.dropped:
        name = "_write_counts" if crash_before == "count" else "_delete"
        with monkeypatch.context() as patched:
            patched.setattr(Spool, name, lambda *_args, **_kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
            try:
                put(spool, 7, seq)
            except KeyboardInterrupt:
                break
        seq += 1
    spool.close()
    again = Spool(tmp_path, 16_000)
    held = [key[1] for key in keys(again)]
    assert again.dropped + len(held) == seq
    assert sum(gaps(again).values()) == again.dropped


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 50, -1])
def test_a_torn_last_record_is_as_if_it_had_never_been(tmp_path, kept):
    spool = Spool(tmp_path, BIG)
    put(spool, 7, 1, {"nbd-0": 1})
    whole = spool.size_bytes
    put(spool, 7, 2, {"nbd-0": 2})
    path = segment.path_of(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(data[: whole + kept] if kept >= 0 else data[:-1])
    spool.close()
    again = Spool(tmp_path, BIG)
    assert keys(again) == [(7, 1)]
    assert again.marks == {"nbd-0": 1}
    assert again.dropped == 0
    put(again, 8, 1)
    again.close()
    assert keys(Spool(tmp_path, BIG)) == [(7, 1), (8, 1)]


def test_a_torn_magic_is_an_empty_segment(tmp_path):
    segment.path_of(tmp_path, 3).write_bytes(b"SLA")
    spool = Spool(tmp_path, BIG)
    assert spool.newest() is None
    put(spool, 7, 1)
    assert segment.numbers(tmp_path) == [4]


def test_a_damaged_record_loses_the_rest_of_its_segment_and_is_counted(tmp_path):
    spool = Spool(tmp_path, BIG)
    for seq in (1, 2, 3):
        put(spool, 7, seq)
    spool.close()
    put(spool, 7, 4)
    path = segment.path_of(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    spool.close()
    again = Spool(tmp_path, BIG)
    assert keys(again) == [(7, 1), (7, 4)]
    assert (again.dropped, gaps(again)) == (2, {(7, 4): 2})


def test_a_failed_write_leaves_the_spool_as_it_was(tmp_path, monkeypatch):
    spool = Spool(tmp_path, BIG)
    put(spool, 7, 1, {"nbd-0": 1})
    real = segment.os.write
    with monkeypatch.context() as patched:
        patched.setattr(segment.os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        with pytest.raises(SpoolWriteFailed, match="spool_bytes"):
            put(spool, 7, 2, {"nbd-0": 2})
    assert (keys(spool), spool.marks, spool.newest().seq) == ([(7, 1)], {"nbd-0": 1}, 1)
    put(spool, 7, 2)
    spool.close()
    assert keys(Spool(tmp_path, BIG)) == [(7, 1), (7, 2)]


def test_more_epochs_than_a_registration_may_name_drop_the_oldest(tmp_path):
    spool = Spool(tmp_path, BIG)
    for epoch in range(1, MAX_EPOCHS + 4):
        put(spool, epoch, 1)
    spool.close()
    again = Spool(tmp_path, BIG)
    assert len(again.epochs()) == MAX_EPOCHS
    assert (again.dropped, gaps(again)) == (3, {(4, 1): 3})


def test_lost_counts_do_not_stop_the_agent(tmp_path):
    put(Spool(tmp_path, BIG), 7, 1)
    (tmp_path / "dropped.json").write_text("{")
    assert keys(Spool(tmp_path, BIG)) == [(7, 1)]


def test_a_spool_that_cannot_be_used_says_what_to_check(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((SpoolUnusable, Exception), match="state_dir"):
        Spool(tmp_path / "file", BIG)


OPERATIONS = st.lists(
    st.one_of(
        st.just(("append", 0)),
        st.tuples(st.just("forget"), st.integers(0, 40)),
        st.just(("restart", 0)),
        st.tuples(st.just("read"), st.integers(0, 40)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_the_spool_is_a_list(tmp_path_factory, operations):
    """Never more than the model, never less; a restart may bring acknowledged cuts back, nothing else."""
    directory = tmp_path_factory.mktemp("spool")
    spool, epoch, seq = Spool(directory, BIG), 1, 0
    unforgotten: list[tuple[int, int]] = []
    back: set[tuple[int, int]] = set()
    for name, number in operations:
        if name == "append":
            seq += 1
            put(spool, epoch, seq)
            unforgotten.append((epoch, seq))
        elif name == "forget" and unforgotten:
            of_epoch, upto = unforgotten[number % len(unforgotten)]
            spool.forget(of_epoch, upto)
            back |= {key for key in unforgotten if key[0] == of_epoch and key[1] <= upto}
            unforgotten = [key for key in unforgotten if key not in back]
        elif name == "restart":
            spool.close()
            spool, epoch, seq = Spool(directory, BIG), epoch + 1, 0
            for old, _first, last in spool.epochs():  # the server acknowledges again what it has
                acked = [key[1] for key in back if key[0] == old and key[1] <= last]
                spool.forget(old, max(acked, default=0))
        elif name == "read" and unforgotten:
            start = unforgotten[number % len(unforgotten)]
            assert keys(spool, start) == unforgotten[unforgotten.index(start) :]
        assert keys(spool) == unforgotten


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["append", "append", "append", "take", "restart"]), max_size=150))
def test_taken_dropped_and_held_cuts_are_all_the_cuts(tmp_path_factory, operations):
    """Small spool: whatever happens, every cut is taken, held, or counted in the gap of a cut behind it."""
    directory = tmp_path_factory.mktemp("spool")
    spool, epoch, seq, made = Spool(directory, 6_000), 1, 0, 0
    taken, gap_taken = 0, 0
    for name in operations:
        if name == "append":
            seq, made = seq + 1, made + 1
            put(spool, epoch, seq)
        elif name == "take":
            for item in list(spool.read_from(None))[:3]:
                taken, gap_taken = taken + 1, gap_taken + cut.decode(item.raw).gap
                spool.forget(item.epoch, item.seq)
        elif name == "restart" and spool.cuts:
            # A restart with nothing held would bring an acknowledged cut back, which the server drops.
            forgotten = taken and spool.epochs()
            spool.close()
            spool = Spool(directory, 6_000)
            if forgotten:
                for key in [key for key in keys(spool) if key < tuple(forgotten[0][:2])]:
                    spool.forget(*key)
            epoch, seq = epoch + 1, 0
        held_gap = sum(gaps(spool).values())
        assert taken + spool.cuts + gap_taken + held_gap == made
        assert gap_taken + held_gap == spool.dropped
