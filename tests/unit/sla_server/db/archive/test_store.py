"""The contract of a store of files, on a directory and on an fsspec URL."""

from __future__ import annotations

import os

import pytest

from sla_server.db.archive.store import LocalFiles, UrlFiles, open_files, sweep
from sla_server.db.config import DatabaseConfig
from sla_server.db.errors import FilesUnavailable
from sla_server.db.rollups import FilesAt

NAME = "cuts/2027-01-15/abcd-1-5.parquet"


@pytest.fixture(params=["local", "url"])
def files(request, tmp_path):
    if request.param == "local":
        return LocalFiles(tmp_path / "parquet")
    return UrlFiles(f"memory://{tmp_path.name}-{id(tmp_path)}/cuts-of-a-server", tmp_path / "aside")


def put(files, name, contents=b"whole"):
    aside = files.aside(name)
    aside.write_bytes(contents)
    files.publish(aside, name)
    return aside


def test_a_published_file_is_there_whole_and_its_aside_is_gone(files):
    aside = put(files, NAME)
    assert aside.name == "_abcd-1-5.parquet"
    assert not aside.exists()
    with files.open(NAME) as file:
        assert file.seek(0, 2) == 5
        file.seek(1)
        assert file.read() == b"hole"
    [(name, found)] = files.listing().items()
    assert (name, found.bytes) == (NAME, 5)
    assert files.path_for_readers(NAME).endswith("/" + NAME)


def test_a_file_under_way_is_in_no_listing(files):
    files.aside(NAME).write_bytes(b"half")
    assert files.listing() == {}
    assert sweep(files, "ffff", set(), 0) == []
    assert sweep(files, "abcd", set(), 0) == ["_abcd-1-5.parquet"]


def test_publishing_again_replaces(files):
    put(files, NAME)
    put(files, NAME, b"another")
    with files.open(NAME) as file:
        assert file.read() == b"another"


def test_removing_twice_is_fine_and_a_missing_file_says_so(files):
    put(files, NAME)
    files.remove(NAME)
    files.remove(NAME)
    assert files.listing() == {}
    with pytest.raises(FileNotFoundError):
        files.open(NAME)


def test_an_empty_store_lists_nothing(files):
    assert files.listing() == {}
    assert files.address


def test_sweep_spares_what_is_kept_and_what_others_may_commit(files):
    orphan, foreign = NAME.replace("-5", "-9"), NAME.replace("abcd", "ffff")
    for name in (NAME, orphan, foreign):
        put(files, name)
    assert sweep(files, "abcd", {NAME}, 0) == [orphan]
    assert set(files.listing()) == {NAME, foreign}


@pytest.mark.parametrize(("is_shared", "modes"), [(False, {0o700, 0o600}), (True, {0o750, 0o640})])
def test_the_group_reads_files_if_it_may(tmp_path, is_shared, modes):
    """A policy job with a user of its own is shown this directory; nobody else is let in by it."""
    config = DatabaseConfig(files={"group_readable": is_shared})
    files = open_files(config, tmp_path)
    former = os.umask(0o077)  # that of the server
    try:
        put(files, NAME)
    finally:
        os.umask(former)
    root = tmp_path / "parquet"
    assert {path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))} == modes


def test_what_else_a_directory_allows_stays(tmp_path):
    """An administrator's directory of several servers; one that is not ours could not be changed at all."""
    tmp_path.chmod(0o2775)
    put(LocalFiles(tmp_path, group_readable=True), NAME)
    assert tmp_path.stat().st_mode & 0o7777 == 0o2775


def test_files_of_the_rollup_job_are_read_by_the_group_too(tmp_path):
    put(FilesAt(str(tmp_path), group_readable=True).open(), NAME)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o640


def test_the_configuration_chooses(tmp_path):
    assert isinstance(open_files(DatabaseConfig(), tmp_path), LocalFiles)
    config = DatabaseConfig(files={"url": "memory://somewhere"})
    assert isinstance(open_files(config, tmp_path), UrlFiles)


def test_a_driver_that_is_missing_is_a_clear_error(tmp_path):
    with pytest.raises(FilesUnavailable, match="driver for its protocol"):
        UrlFiles("nosuchprotocol://bucket", tmp_path)


def test_an_upload_that_fails_leaves_the_aside_for_another_try(tmp_path, monkeypatch):
    files = UrlFiles(f"memory://{tmp_path.name}", tmp_path / "aside")
    aside = files.aside(NAME)
    aside.write_bytes(b"whole")

    def broken(*_args, **_options):
        raise RuntimeError("no such bucket")

    with monkeypatch.context() as patch:
        patch.setattr(type(files._fs), "put_file", broken)
        with pytest.raises(FilesUnavailable, match="no such bucket"):
            files.publish(aside, NAME)
    assert files.listing() == {}
    files.publish(aside, NAME)
    assert set(files.listing()) == {NAME}
