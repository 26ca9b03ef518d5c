"""Extended headers between a storage and a client that were both written from the protocol document.

A second proof beside that with QEMU (``test_nbd_extended``), which needs version 8.2. Every wait is for an
event, with a deadline; nothing here asserts how fast something is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nbd_extended_peers import (
    BLOCK_STATUS,
    DISC,
    FLUSH,
    NONE,
    OFFSET_DATA,
    OFFSET_HOLE,
    PAYLOAD_LEN,
    READ,
    STATUS_EXT,
    TRIM,
    WRITE,
    WRITE_ZEROES,
    Asked,
    ExtendedClient,
    ExtendedStorage,
)
from tests.support.planes import Processes, upstream, wait_for

pytestmark = pytest.mark.e2e
TIB = 1 << 40
SIZE = 16 * TIB
AT = 5 * TIB
BLOCK = 4096


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ExtendedStorage]:
    with ExtendedStorage(tmp_path / "up.sock", SIZE) as made:
        yield made


def test_requests_of_terabytes_pass_once_and_their_answers_come_back(
    run: Processes, tmp_path: Path, storage: ExtendedStorage
) -> None:
    run.plane([upstream(tmp_path)], client_rule="address")
    link = run.link()
    wait_for("the upstream was asked", lambda: "volume-known" in run.logs())
    client = ExtendedClient(run.connected("gw.sock"), "vol-1")
    assert client.size_bytes == SIZE

    written = client.do(WRITE, AT, 2 * BLOCK, b"w" * 2 * BLOCK)
    read = client.do(READ, AT - BLOCK, 4 * BLOCK)
    status = client.do(BLOCK_STATUS, 0, SIZE)
    assert (written.kinds, written.error) == ([NONE], 0)
    assert (read.kinds, read.data) == (
        [OFFSET_HOLE, OFFSET_DATA, OFFSET_DATA, OFFSET_HOLE, NONE],
        bytes(BLOCK) + b"w" * 2 * BLOCK + bytes(BLOCK),
    )
    assert status.kinds == [STATUS_EXT]
    assert status.extents == [(AT, 3), (BLOCK, 0), (BLOCK, 0), (SIZE - AT - 2 * BLOCK, 3)]

    for command in (TRIM, WRITE_ZEROES):
        client.do(WRITE, AT, BLOCK, b"w" * BLOCK)
        assert client.do(command, TIB, 10 * TIB).kinds == [NONE]
        assert client.do(READ, AT, BLOCK).data == bytes(BLOCK)
    assert client.do(FLUSH, 0, 0).kinds == [NONE]
    client.leave()
    large = [each for each in storage.asked if each.length > 1 << 32]
    assert large == [
        Asked(BLOCK_STATUS, 0, 0, SIZE), Asked(TRIM, 0, TIB, 10 * TIB), Asked(WRITE_ZEROES, 0, TIB, 10 * TIB),
    ]  # fmt: skip
    assert {each.flags for each in storage.asked if each.command == WRITE} == {PAYLOAD_LEN}
    ours = link.totals()["vol-1", f"uid-{os.getuid()}"]
    assert (ours["reads"], ours["writes"], ours["others"], ours["errors"]) == (3, 3, 4, 0)
    assert (ours["read_bytes"], ours["write_bytes"]) == (6 * BLOCK, 4 * BLOCK)


def test_what_the_document_does_not_allow_is_refused_and_the_connection_lives_on(
    run: Processes, tmp_path: Path, storage: ExtendedStorage
) -> None:
    run.plane([upstream(tmp_path)])
    wait_for("the upstream was asked", lambda: "volume-known" in run.logs())
    client = ExtendedClient(run.connected("gw.sock"), "vol-1")
    for command, offset, length, flags, error in (
        (WRITE_ZEROES, SIZE - BLOCK, 10 * TIB, 0, errno.ENOSPC),
        (TRIM, SIZE - BLOCK, 10 * TIB, 0, errno.EINVAL),
        (TRIM, 1 << 63, 1 << 63, 0, errno.EINVAL),
        (READ, 0, TIB, 0, errno.EINVAL),
        (BLOCK_STATUS, 0, 0, 0, errno.EINVAL),
        (READ, 0, BLOCK, 1 << 14, errno.EINVAL),
        (99, 0, BLOCK, 0, errno.EINVAL),
    ):
        assert client.do(command, offset, length, flags=flags).error == error, command
    assert client.do(READ, 0, BLOCK, b"payload".ljust(BLOCK)).error == errno.EINVAL
    assert client.do(READ, 0, BLOCK).data == bytes(BLOCK)
    assert [each for each in storage.asked if each.command != DISC] == [Asked(READ, 0, 0, BLOCK)]
    client.leave()
