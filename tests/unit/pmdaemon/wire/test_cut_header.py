"""The header of a CUT frame, as the spool and the ingest queue use it."""

from __future__ import annotations

import hashlib

import pytest

from pmdaemon.errors import BadCut, WireError
from pmdaemon.wire import cut, frame
from pmdaemon.wire.cut_header import CutHeader, marks_in, with_gap
from pmdaemon.wire.kinds import Kind
from tests.support.paths import FIXTURES

GOLDEN = (FIXTURES / "golden" / "v1" / "cut.bin").read_bytes()
GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"


def test_a_golden_cut_says_which_it_is() -> None:
    assert CutHeader.parse(GOLDEN) == (GATEWAY, 0xFEDCBA9876543210, 42, 2)
    assert marks_in(GOLDEN) == {"nbd-0": 9}


def test_another_gap_changes_no_other_byte() -> None:
    assert with_gap(GOLDEN, 2) == GOLDEN
    changed = with_gap(GOLDEN, 70)
    assert CutHeader.parse(changed).gap == 70
    before, after = frame.decode(GOLDEN), frame.decode(changed)
    assert after.header == before.header | {"gap": 70}
    assert hashlib.sha256(after.blob).digest() == hashlib.sha256(before.blob).digest()


@pytest.mark.parametrize("header", [{}, {"gw": bytes(16), "ep": 0, "seq": 1}, {"gw": bytes(16), "ep": 1}])
def test_a_cut_without_identity_is_refused(header: dict[str, object]) -> None:
    with pytest.raises(BadCut):
        CutHeader.parse(frame.encode(Kind.CUT, header))


def test_what_is_no_frame_has_no_marks() -> None:
    assert marks_in(b"") == marks_in(b"\xff" * 64) == marks_in(frame.encode(Kind.CUT, {"dp": 5})) == {}
    with pytest.raises(WireError):
        CutHeader.parse(b"\xff" * 64)
    assert cut.gap_of({"gap": -1}) == 0
