"""Entries of systemd's journal: their fields, and when a process writes them at all."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from pmdaemon.runtime import journal
from pmdaemon.runtime.journal import MOST_FIELDS, STREAM, JournalEntry, encoded, is_stream, message_id, opened


def fields(data: bytes) -> dict[str, str]:
    """What the journal reads from a datagram."""
    found = {}
    while data:
        head, _, rest = data.partition(b"\n")
        name, is_short, value = head.partition(b"=")
        if not is_short:
            size = struct.unpack_from("<Q", rest)[0]
            value, rest = rest[8 : 8 + size], rest[9 + size :]
        found[name.decode()] = value.decode()
        data = rest
    return found


def test_an_entry_can_be_selected_by_process_event_level_and_value() -> None:
    line = JournalEntry.of(
        "segment-damaged path=/run/x",
        {
            "event": "segment-damaged",
            "level": "error",
            "process": "supervisor",
            "timestamp": "2027",
            "path": "/run/x",
        },
    )
    assert fields(encoded("other", line)) == {
        "MESSAGE": "segment-damaged path=/run/x",
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "sla-supervisor",
        "MESSAGE_ID": message_id("segment-damaged"),
        "SLA_EVENT": "segment-damaged",
        "SLA_PATH": "/run/x",
    }


def test_what_was_printed_is_an_entry_too() -> None:
    assert fields(encoded("services", "a warning of Python")) == {
        "MESSAGE": "a warning of Python",
        "PRIORITY": "5",
        "SYSLOG_IDENTIFIER": "sla-services",
    }


def test_values_of_several_lines_and_names_of_any_kind_forge_no_field() -> None:
    line = JournalEntry.of("x", {"event": "x", "level": "info", "text": "a\nPRIORITY=0", "a=b c\n": "1"})
    found = fields(encoded("link", line))
    assert found["SLA_TEXT"] == "a\nPRIORITY=0"
    assert found["SLA_A_B_C_"] == "1"
    assert found["PRIORITY"] == "6"


def test_an_entry_is_bounded() -> None:
    many = {f"k{number}": "x" * 100_000 for number in range(100)}
    data = encoded("link", JournalEntry.of("x" * 100_000, {"event": "x", **many}))
    assert len(fields(data)) == 5 + MOST_FIELDS
    assert len(data) < 200_000


def test_the_id_of_an_event_stays_what_it_is() -> None:
    """People select by it: a change is one of an interface."""
    assert message_id("server-started") == "e67dadd749f35675be86adb89d3504dd"


def test_a_file_is_no_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.delenv(STREAM, raising=False)
        assert not is_stream(file.fileno())
        monkeypatch.setenv(STREAM, "8:1")  # inherited; stderr was redirected since
        assert opened(file.fileno()) is None
        status = os.fstat(file.fileno())
        monkeypatch.setenv(STREAM, f"{status.st_dev}:{status.st_ino}")
        assert is_stream(file.fileno())
        monkeypatch.setenv(STREAM, "nonsense")
        assert not is_stream(file.fileno())


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # it is open until the process ends
def test_a_journal_that_was_started_again_gets_every_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "socket"
    monkeypatch.setattr(journal, "SOCKET", str(address))

    def started() -> socket.socket:
        address.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.bind(str(address))
        return made

    with started() as before, (tmp_path / "log").open("w") as file:
        status = os.fstat(file.fileno())
        monkeypatch.setenv(STREAM, f"{status.st_dev}:{status.st_ino}")
        send = opened(file.fileno())
        assert send is not None
        send(b"1")
        assert before.recv(10) == b"1"
    for _ in range(2):
        with pytest.raises(OSError):
            send(b"lost")
    with started() as after:
        for data in (b"2", b"3"):
            send(data)
            assert after.recv(10) == data
