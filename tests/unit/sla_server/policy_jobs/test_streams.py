"""Streams on the backend of today, numbered within their volume."""

from __future__ import annotations

import pyarrow as pa

from sla_server.policy_jobs.streams import streams_now, widest

STREAMS = pa.schema(
    [("stream_id", pa.int64())] + [(name, pa.string()) for name in ("volume", "client", "backend")]
)


def streams(*rows: tuple[int, str, str, str]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(STREAMS.names, row, strict=True)) for row in rows], schema=STREAMS)


def volumes(**backends: str) -> pa.Table:
    return pa.table(
        {"volume": pa.array(backends, pa.string()), "backend": pa.array(backends.values(), pa.string())}
    )


def test_a_volume_that_was_moved_lies_on_one_backend() -> None:
    known = streams((1, "erp", "a", "disk"), (2, "batch", "b", "disk"), (3, "batch", "c", "disk"))
    found = streams_now(known, volumes(batch="new-array", other="disk"))
    assert dict(zip(found["stream_id"].to_pylist(), found["backend"].to_pylist(), strict=True)) == {
        1: "disk",
        2: "new-array",
        3: "new-array",
    }
    assert found.drop_columns(["backend", "rank"]).equals(known.drop_columns(["backend"]))


def test_streams_of_a_volume_have_numbers_from_zero_wherever_they_are_in_the_table() -> None:
    known = streams(*((number, "abcab"[number % 5], "x", "disk") for number in range(11)))
    whole = pa.concat_tables([known.slice(0, 4), known.slice(4)])  # in two chunks
    found = streams_now(whole, volumes())
    ranks: dict[str, list[int]] = {}
    for name, rank in zip(found["volume"].to_pylist(), found["rank"].to_pylist(), strict=True):
        ranks.setdefault(name, []).append(rank)
    assert {name: sorted(of) for name, of in ranks.items()} == {
        "a": [0, 1, 2, 3, 4],
        "b": [0, 1, 2, 3],
        "c": [0, 1],
    }
    assert widest(found) == 5


def test_without_streams_there_is_nothing_to_number() -> None:
    found = streams_now(streams(), volumes(erp="disk"))
    assert found.column_names == ["stream_id", "volume", "client", "backend", "rank"]
    assert found.num_rows == 0
    assert widest(found) == 1
