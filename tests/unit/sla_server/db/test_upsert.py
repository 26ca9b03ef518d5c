"""Binary COPY streams, byte by byte."""

from __future__ import annotations

import numpy as np

from sla_server.db.upsert import copy_stream

HEAD = b"PGCOPY\n\xff\r\n\x00" + b"\x00" * 8


def test_integers_text_and_blobs_of_a_row():
    columns = [np.array([-2, 1 << 40]), np.array([7, 8]), ["ä", ""], [b"\x00\x01\x02", b""]]
    expected = [
        b"\x00\x04",
        b"\x00\x00\x00\x08" + (-2).to_bytes(8, "big", signed=True),
        b"\x00\x00\x00\x04\x00\x00\x00\x07",
        b"\x00\x00\x00\x02\xc3\xa4",
        b"\x00\x00\x00\x03\x00\x01\x02",
        b"\x00\x04",
        b"\x00\x00\x00\x08" + (1 << 40).to_bytes(8, "big"),
        b"\x00\x00\x00\x04\x00\x00\x00\x08",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x00",
    ]
    data = b"".join(copy_stream(columns, ["BIGINT", "INTEGER", "TEXT", "BYTEA"]))
    assert data == HEAD + b"".join(expected) + b"\xff\xff"


def test_rows_of_integers_only():
    data = b"".join(copy_stream([np.array([1, 2, 3])], ["BIGINT"]))
    row = b"\x00\x01\x00\x00\x00\x08" + bytes(7)
    assert data == HEAD + b"".join(row + bytes([n]) for n in (1, 2, 3)) + b"\xff\xff"
