"""How programs end: one line, one status, and notes of why parts ended."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
from pathlib import Path

import click
import pytest

from pmdaemon.errors import ConfigError, SlaError
from pmdaemon.runtime.failures import MOST_FAULTS, failure_recorded, failures, outermost


def test_a_note_stands_from_the_end_by_an_error_until_the_next_start(tmp_path: Path) -> None:
    for name in ("services", "dbmanager"):
        with pytest.raises(SlaError), failure_recorded(tmp_path, name):
            raise SlaError(f"no room for {name}")
    assert failures(tmp_path) == {"dbmanager": "no room for dbmanager", "services": "no room for services"}
    with failure_recorded(tmp_path, "services"):
        assert list(failures(tmp_path)) == ["dbmanager"]
    assert list(failures(tmp_path)) == ["dbmanager"]


def test_the_error_comes_through_where_no_note_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(SlaError, match="the reason"), failure_recorded(tmp_path / "missing", "services"):
        raise SlaError("the reason")
    assert failures(tmp_path / "missing") == {}


def ended(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and stderr of a program that ends by ``error``."""
    with pytest.raises(SystemExit) as caught, outermost("a program"):
        raise error
    return int(caught.value.code or 0), capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError("data_dir", "it is a file", "Name a directory")
    assert ended(error, capsys) == (78, "a program: data_dir: it is a file. Name a directory\n")


def test_a_full_disk_is_one_line_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = ended(OSError(28, "No space left on device", "/dev/shm/x/api.port"), capsys)
    assert status == 74
    assert text.startswith("a program: /dev/shm/x/api.port: No space left on device. Check ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOMEM, "x"), "Cannot allocate memory. Free memory"),
        (MemoryError(), "Cannot allocate memory. Free memory"),
        (OSError(errno.EMFILE, "x", "/some/file"), "Too many open files. Raise the limit of open files"),
        (OSError(errno.ENFILE, "x"), "Too many open files in system. This host"),
        (RuntimeError("can't start new thread"), "No thread can be started. Free memory"),
    ],
)
def test_what_has_run_out_is_not_blamed_on_a_path(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, text = ended(error, capsys)
    assert status == 74
    assert text.startswith(f"a program: {said}")
    assert "path" not in text
    with pytest.raises(type(error)), failure_recorded(tmp_path, "services"):
        raise error
    assert failures(tmp_path)["services"] == text.removeprefix("a program: ").strip()


def test_a_mistake_of_ours_is_one_line_and_its_traceback_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(3):
        status, text = ended(ZeroDivisionError("by nothing"), capsys)
        assert status == 70
        assert text.count("\n") == 1
        assert "ZeroDivisionError: by nothing. This is a fault of the program; please report it with" in text
    (file,) = tmp_path.iterdir()  # the same place, the same file
    assert text.endswith(f"{file}\n")
    assert "Traceback" in file.read_text()


def test_a_new_fault_has_a_file_however_many_there_were(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "a-program-fault-of-before.txt").write_text("by an earlier release")
    os.utime(tmp_path / "a-program-fault-of-before.txt", ns=(0, 0))
    for number in range(MOST_FAULTS + 3):
        kind = type(f"Fault{number}", (Exception,), {})
        _, text = ended(kind("x"), capsys)
        named = Path(text.strip().rpartition(" ")[2])
        assert f"Fault{number}" in named.read_text()
        os.utime(named, ns=(number, number))  # clocks of file systems are coarse
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == MOST_FAULTS
    assert "a-program-fault-of-before.txt" not in left


def test_an_interrupt_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(KeyboardInterrupt(), capsys) == (130, "")


def test_errors_of_the_command_line_pass() -> None:
    with pytest.raises(click.UsageError), outermost("a program"):
        raise click.UsageError("no such option")


class Refusing(io.StringIO):
    """A stderr on a full disk."""

    tried = 0

    def write(self, _text: str) -> int:
        self.tried += 1
        raise OSError(28, "No space left on device")


def test_a_line_that_cannot_be_written_changes_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Refusing()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(SystemExit) as caught, outermost("a program"):
        raise SlaError("whatever")
    assert caught.value.code == 1
    assert stream.tried
