"""What nodes read of each other: whatever is in it, it is one of ours or a ValueError."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from sla_server.cluster.commands import CommandTable, NodeAnswer
from sla_server.cluster.leases import LeaseRecord
from sla_server.cluster.log_stream import decode
from sla_server.cluster.messages.mirror_records import ConsumerRecord, MirrorRecord
from sla_server.cluster.shared import SharedDocument

ODD = [None, True, -1, 1e999, -1e999, float("nan"), "", "x", "9" * 5000, [], {}, [[]], {"a": 1}]
NO_DOCUMENTS = [b"", b"\xff", b"null", b"[]", b"{}", b"1" * 5000, b"NaN", b"[" * 100_000, b'{"a":' * 50_000]
Parse = Callable[[bytes], object]
RECORDS: list[tuple[Parse, Any]] = [
    (MirrorRecord.parse, asdict(MirrorRecord(1, 2, 3, 4, (ConsumerRecord("a", "b", 1),)))),
    (LeaseRecord.parse, asdict(LeaseRecord("n1", 1, 6.0))),
    (NodeAnswer.parse, json.loads(NodeAnswer("n1").encode())),
    (SharedDocument.parse, {"revision": 1, "body": {}}),
    (lambda data: decode("n1", data), [[1, 2, "info", "line"]]),
]


def _read(parse: Parse, data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse(data)


@pytest.mark.parametrize(("parse", "document"), RECORDS)
def test_a_document_of_another_program_is_read_or_refused(parse: Parse, document: Any) -> None:
    for data in NO_DOCUMENTS:
        _read(parse, data)
    row = document[0] if isinstance(document, list) else document
    for place in range(len(row)) if isinstance(row, list) else list(row):
        kept = row[place]
        for odd in ODD:
            row[place] = odd
            _read(parse, json.dumps(document).encode())
        row[place] = kept


@pytest.mark.parametrize("number", ODD)
def test_who_sends_a_command_with_odd_arguments_has_an_answer(number: Any) -> None:
    """Without one the asker waits for its limit, and does not hear why."""

    async def take(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"number": int(arguments["number"])}

    table = CommandTable("n1")
    table.register("take", take)
    message = json.dumps({"command": "take", "arguments": {"number": number}}).encode()
    answer = asyncio.run(table.carry_out(message, 1))
    assert answer.node == "n1"
    assert answer.result or answer.problem


@pytest.mark.parametrize("data", NO_DOCUMENTS)
def test_what_is_no_command_is_answered(data: bytes) -> None:
    assert asyncio.run(CommandTable("n1").carry_out(data, 1)).problem
