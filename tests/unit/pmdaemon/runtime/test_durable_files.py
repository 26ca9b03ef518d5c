"""Every durable small file of the product, under an ``os.fsync`` that is watched, or that fails.

A writer makes its file on the first call and replaces it on the second, where it can.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine

from gateway_agent import enrol
from gateway_agent.errors import GatewayError, StateFileBroken
from gateway_agent.link import state_files
from gateway_agent.link.caps import ThresholdStore
from gateway_agent.link.collection import StreamNames
from gateway_agent.link.identity import write_credential
from gateway_agent.sources.sample import StreamKey
from pmdaemon.errors import ConfigError
from pmdaemon.pki import certificates
from pmdaemon.pki.errors import StateUnusable
from pmdaemon.pki.store import CaStore
from pmdaemon.reserve.layout import make_reserve
from pmdaemon.runtime import files
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.files import copy_durably, make_directory, write_whole
from pmdaemon.wire.messages.thresholds import Thresholds
from sla_server.api.security import load_or_make_token
from sla_server.db import backup
from sla_server.db.archive.store import LocalFiles
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.ingest.batch import put_aside
from sla_server.db.ingest.queue import IngestQueue, IngestRecord
from sla_server.db.migrate import newest_revision, upgrade
from sla_server.db.process import directory_lock
from sla_server.directories import data_identity, prepare_data_dir
from sla_server.events import pair_history
from sla_server.events.pair_store import PartnerNotes

KEY = certificates.make_key()
CERTIFICATE = certificates.der(certificates.make_authority(KEY, 1_800_000_000_000_000, 86_400.0))


def authority(directory: Path, content: str) -> None:
    store = CaStore(directory / "ca")
    store.create()
    store.write("ca.crt", content.encode())


def burn(directory: Path, content: str) -> None:
    store = CaStore(directory / "ca")
    store.create()
    (directory / "ca/tokens/a.json").write_text(content)
    store.move("tokens/a.json", "tokens/used/a.json")


def own(directory: Path, _content: str) -> None:
    write_credential(directory, KEY, CERTIFICATE)


def gateway_id(directory: Path, _content: str) -> None:
    state_files.make_private_directory(directory / "state")
    state_files.gateway_id(directory / "state")


def thresholds(directory: Path, content: str) -> None:
    ThresholdStore(directory / "thresholds.json").replace(Thresholds(len(content), ()))


def streams(directory: Path, content: str) -> None:
    book = StreamNames("0" * 32, directory / "streams.json")
    book.add(StreamKey(content, "client", "backend"))
    book.save()


def token(directory: Path, _content: str) -> None:
    load_or_make_token(directory / "data" / "api.token")


def refused(directory: Path, content: str) -> None:
    put_aside(directory / "refused", IngestRecord(7, content.encode()), "no", 1)


def parquet(directory: Path, content: str) -> None:
    store = LocalFiles(directory / "parquet")
    name = "cuts/2027-01-15/a-1-5.parquet"
    aside = store.aside(name)
    aside.write_text(content)
    store.publish(aside, name)


def copied(directory: Path, content: str) -> None:
    (directory / "source").write_text(content)
    copy_durably(directory / "source", directory / "copy")


class EnrolServer:
    """In place of the connection to a server: it signs what it is asked to."""

    def __init__(self, *_given: object) -> None:
        """As the connection's, which gets address, context and deadline."""

    def __enter__(self) -> EnrolServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Nothing is open."""

    def ask(self, _kind: object, body: dict[str, Any], _answer: object) -> dict[str, Any]:
        if not body:
            return {"ca": CERTIFICATE}
        signer = certificates.Signer(KEY, certificates.certificate_in(certificates.pem_of_der(CERTIFICATE)))
        key = certificates.public_key_of_request(body["csr"])
        made = signer.gateway(key, body["gw"], "gw-a", 1_800_000_000_000_000, 3600.0)
        return {"cert": certificates.der(made)}


def enrolled(directory: Path, _content: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enrol, "_EnrolConnection", EnrolServer)  # the network
        fingerprint = certificates.fingerprint(CERTIFICATE)
        enrol.enrol(directory, "5c2e7f4e-1f0f-4f4e-9a6e-0d8f0b1c2d3e", ("server", 1), "t", fingerprint)


def identity(directory: Path, _content: str) -> None:
    if not data_identity(directory)[0]:
        raise OSError("it says so by an empty one: the next start tries again")


def partner(directory: Path, content: str) -> None:
    PartnerNotes(gone=[content]).write(directory)


def reserve(directory: Path, content: str) -> None:
    make_reserve(directory / "events/services.initial.reserve", len(content))


@functools.cache
def database() -> bytes:
    """An SQLite database with the schema and no rows."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(DatabaseConfig(), Path(folder))
        upgrade(engine)
        engine.dispose()
        return (Path(folder) / "sla.db").read_bytes()


def engine_in(folder: Path) -> Engine:
    return make_engine(DatabaseConfig(), folder)


def unused(directory: Path, name: str, marker: str) -> Path:
    """A directory for the next backup or restore: that of one that failed is given up, as people do."""
    if (directory / name / marker).exists():
        return directory / f"{name}-{len(list(directory.iterdir()))}"
    shutil.rmtree(directory / name, ignore_errors=True)
    return directory / name


def backed_up(directory: Path, _content: str) -> None:
    server, target = directory / "server", unused(directory, "saved", backup.HEAD)
    make_directory(server)
    (server / "sla.db").write_bytes(database())
    (server / "api.token").write_text("secret")
    engine = engine_in(server)
    try:
        backup.make(engine, LocalFiles(server / "parquet"), server, server / "queue", target, FakeClock())
    finally:
        engine.dispose()


def dumped(directory: Path, content: str) -> None:
    backed_up(directory, content)


def restored(directory: Path, _content: str) -> None:
    saved, data = directory / "saved", unused(directory, "data", "sla.db")
    make_directory(saved)
    (saved / "sla.db").write_bytes(database())
    head = backup.BackupHead(
        backup.FORMAT, 1, "0", newest_revision(), "sqlite", 0, 0, hashlib.sha256(database()).hexdigest(), []
    )
    (saved / backup.HEAD).write_text(json.dumps(dataclasses.asdict(head)))
    engine = engine_in(data)
    try:
        backup.restore(engine, LocalFiles(data / "parquet"), data, saved)
    finally:
        engine.dispose()


class Case(NamedTuple):
    write: Callable[[Path, str], None]
    file: str
    error: type[BaseException]


CASES = [
    Case(authority, "ca/ca.crt", StateUnusable),
    Case(burn, "ca/tokens/used/a.json", StateUnusable),
    Case(own, "gateway.pem", OSError),
    Case(gateway_id, "state/gateway_id", StateFileBroken),
    Case(thresholds, "thresholds.json", OSError),
    Case(streams, "streams.json", OSError),
    Case(token, "data/api.token", ConfigError),
    Case(refused, "refused/00000000000000000007.rec", OSError),
    Case(parquet, "parquet/cuts/2027-01-15/a-1-5.parquet", OSError),
    Case(copied, "copy", OSError),
    Case(enrolled, "tls/ca.crt", GatewayError),
    Case(identity, "identity", OSError),
    Case(reserve, "events/services.initial.reserve", OSError),
    Case(partner, "partner.json", OSError),
    Case(backed_up, "saved/backup.json", OSError),
    Case(dumped, "saved/sla.db", OSError),
    Case(restored, "data/sla.db", OSError),
]
NAMES = [case.write.__name__ for case in CASES]


class Disk:
    """``os.fsync``: what was synced, in order; the ``fails_at``-th call fails."""

    def __init__(self) -> None:
        self.synced: list[Path] = []
        self.done: set[Path] = set()
        self.fails_at = 0
        self._fsync = os.fsync

    def fsync(self, fd: int) -> None:
        self.synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        if len(self.synced) == self.fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(fd)
        self.done.add(self.synced[-1])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(os, "fsync", made.fsync)
    return made


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_content_then_name_and_new_directories_in_their_parents(
    case: Case, tmp_path: Path, disk: Disk
) -> None:
    case.write(tmp_path, "content")
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.parent for path in made} <= set(disk.synced)
    final = tmp_path / case.file
    last = len(disk.synced) - 1 - disk.synced[::-1].index(final.parent)
    if case.write is not burn:  # a rename, its content was synced before
        [content] = [number for number, path in enumerate(disk.synced) if final.name in path.name]
        assert disk.synced[content].parent == final.parent
        assert content < last


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_disk_that_fails_at_any_sync_is_an_error_and_costs_neither_the_old_nor_the_new(
    case: Case, tmp_path: Path, disk: Disk
) -> None:
    (tmp_path / "probe").mkdir()
    case.write(tmp_path / "probe", "content")
    total = len(disk.synced)
    assert total > 1
    for number in range(1, 2 * total):
        directory = tmp_path / str(number)
        directory.mkdir()
        disk.synced, disk.fails_at = [], number
        if number > total:
            disk.fails_at = 0
            case.write(directory, "old")
            disk.synced, disk.fails_at = [], number - total
        final = directory / case.file
        old = final.read_bytes() if final.exists() else None
        try:
            case.write(directory, "newer")
            assert len(disk.synced) < disk.fails_at, "the failure was swallowed"
        except case.error:
            assert len(disk.synced) >= disk.fails_at
        assert not list(directory.rglob(".*")), "nothing is left aside"
        if old is not None:
            assert final.exists()
        disk.fails_at = 0
        case.write(directory, "newest")
        assert final.read_bytes()
        made = [path for path in directory.rglob("*") if path.is_dir()]
        assert {path.parent for path in made} <= disk.done


def test_all_that_a_backup_is_made_of_is_on_disk_before_its_head(tmp_path: Path, disk: Disk) -> None:
    """Without it the directory is no backup; with it everything that it names must be there."""
    backed_up(tmp_path, "")
    saved = tmp_path / "saved"
    [head] = [number for number, path in enumerate(disk.synced) if backup.HEAD in path.name]
    before = disk.synced[:head]
    for name in ("sla.db", "state/.api.token"):
        content = [path for path in before if str(path).startswith(str(saved / name))]
        assert len(content) == 1, name
    last = len(before) - 1 - before[::-1].index(saved)
    assert last > before.index(saved / "sla.db"), "the name of the dump, and of the folders"
    assert disk.synced[head + 1 :] == [saved]


def test_openings_of_queues_are_on_disk_or_not_there(tmp_path: Path, disk: Disk) -> None:
    """An older file would be worse than none, so a disk that fails costs both."""
    pair_history.begin(tmp_path, {"0123456789abcdef": 7})
    assert [path.name.startswith(f".{pair_history.FILE}") for path in disk.synced] == [True, False]
    assert disk.synced[1] == tmp_path
    for fails_at in (1, 2):
        disk.synced, disk.fails_at = [], fails_at
        assert len(pair_history.begin(tmp_path, {"0123456789abcdef": 9})) == 1
        assert not list(tmp_path.iterdir())
        assert disk.synced[-1] == tmp_path


def test_a_failed_sync_of_the_content_leaves_the_old_file(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "file"
    write_whole(path, "old", synced=True)
    disk.fails_at = len(disk.synced) + 1
    with pytest.raises(OSError, match="Input/output"):
        write_whole(path, "new", synced=True)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["old"]


def test_a_name_that_a_dead_process_left_unsynced_is_synced_before_it_is_used(
    tmp_path: Path, disk: Disk
) -> None:
    """Killed between rename and sync of the directory: the next start relies on the id."""
    (tmp_path / "gateway_id").write_text("5c2e7f4e-1f0f-4f4e-9a6e-0d8f0b1c2d3e\n")
    state_files.gateway_id(tmp_path)
    assert disk.synced == [tmp_path]


def data_dir(path: Path) -> None:
    prepare_data_dir(path)


def manager_dir(path: Path) -> None:
    with directory_lock(path):
        pass


def queue_dir(path: Path) -> None:
    IngestQueue(path, 1 << 20).close()


def spool_dir(path: Path) -> None:
    state_files.make_private_directory(path)


def authority_dir(path: Path) -> None:
    CaStore(path).create()


def parquet_dir(path: Path) -> None:
    _ = LocalFiles(path).lock_dir


def token_dir(path: Path) -> None:
    load_or_make_token(path / "api.token")


@pytest.mark.parametrize(
    "use", [data_dir, manager_dir, queue_dir, spool_dir, authority_dir, parquet_dir, token_dir]
)
@pytest.mark.parametrize("made", ["a", "a/b"])
def test_a_directory_that_a_dead_process_left_unsynced_is_synced_before_it_is_used(
    tmp_path: Path, disk: Disk, use: Callable[[Path], None], made: str
) -> None:
    """Killed between making a directory and the sync of its parent: the next start relies on its name."""
    for name in ("a", "a/b")[: 1 + made.count("/")]:
        (tmp_path / name).mkdir(mode=0o700)
    use(tmp_path / "a/b")
    assert (tmp_path / made).parent in disk.done
    assert tmp_path / "a" in disk.done


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS])
def test_a_parent_that_cannot_be_synced_by_its_kind_is_left_to_whoever_made_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    tried = []

    def refused(path: Path) -> None:
        tried.append(path)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "sync_directory", refused)
    make_directory(tmp_path)
    assert tried == [tmp_path.parent]


def test_a_disk_that_fails_under_a_directory_that_exists_is_an_error(tmp_path: Path, disk: Disk) -> None:
    disk.fails_at = 1
    with pytest.raises(OSError, match="Input/output"):
        make_directory(tmp_path)


def test_a_directory_keeps_its_mode_and_what_stands_in_the_way_is_told(tmp_path: Path) -> None:
    make_directory(tmp_path / "a/b/c", 0o700)
    assert stat.S_IMODE((tmp_path / "a/b/c").stat().st_mode) == 0o700
    make_directory(tmp_path / "a/b/c")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "file")
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "file/below")
