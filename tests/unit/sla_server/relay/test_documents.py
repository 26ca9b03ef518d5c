"""Documents of a relay: a folder in the place of ``sla apply``, with the same checks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pmdaemon.errors import ConfigError
from sla_server.events import routing
from sla_server.relay.documents import DocumentFolder, read_documents

HEAD = "apiVersion: storage-sla/v1\n"
RECIPIENT = HEAD + "kind: Recipient\nmetadata: {name: %s}\nspec: {file: {path: %s.jsonl}}\n"
ROUTE = HEAD + "kind: Route\nmetadata: {name: all}\nspec: {recipients: [%s]}\n"


class Folder:
    def __init__(self, place: Path, data: Path) -> None:
        self.place, self.data = place, data
        self.wrong: list[str] = []
        self.written = 0
        self.documents = DocumentFolder(place, data, self.wrong.append)

    def write(self, name: str, text: str) -> None:
        path = self.place / name
        path.write_text(text)
        self.written += 1
        os.utime(path, ns=(self.written, self.written))  # two writes within a tick of the clock differ, too

    def published(self) -> list[str]:
        content = json.loads((self.data / routing.FILE).read_text())
        return [each["metadata"]["name"] for each in content["documents"]]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    for name in ("documents", "data"):
        (tmp_path / name).mkdir()
    return Folder(tmp_path / "documents", tmp_path / "data")


def test_files_of_a_folder_are_taken_up_and_what_changes_again(folder: Folder) -> None:
    folder.write("b.yaml", ROUTE % "pager")
    folder.write("a.yml", RECIPIENT % ("pager", "pager"))
    folder.write("notes.txt", "no document")
    folder.write(".hidden.yaml", "no: document")
    assert folder.documents.poll()
    assert (folder.published(), folder.wrong) == (["pager", "all"], [])
    assert not folder.documents.poll()
    folder.write("c.yaml", RECIPIENT % ("mail", "mail"))
    assert folder.documents.poll()
    assert folder.published() == ["mail", "pager", "all"] or folder.published() == ["pager", "mail", "all"]


def test_wrong_documents_leave_those_of_before_in_force_and_are_reported_once(folder: Folder) -> None:
    folder.write("a.yaml", RECIPIENT % ("pager", "pager"))
    folder.documents.poll()
    folder.write("a.yaml", RECIPIENT % ("pager", "../pager"))
    assert [folder.documents.poll(), folder.documents.poll()] == [False, False]
    assert folder.published() == ["pager"]
    (said,) = folder.wrong
    assert f"{folder.place / 'a.yaml'}: line " in said
    folder.write("a.yaml", RECIPIENT % ("other", "other"))
    assert folder.documents.poll()
    assert folder.published() == ["other"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "there is no *.yaml in"),
        ({"a.yaml": "kind: ["}, "this is not YAML"),
        ({"a.yaml": ROUTE % "pager"}, "there is no recipient 'pager'"),
        (
            {"a.yaml": RECIPIENT % ("x", "x"), "b.yaml": RECIPIENT % ("x", "y")},
            "has this name already",
        ),
        (
            {"a.yaml": RECIPIENT % ("x", "same"), "b.yaml": RECIPIENT % ("y", "same")},
            "writes 'same.jsonl' already",
        ),
        (
            {"a.yaml": HEAD + "kind: Recipient\nmetadata: {name: page}\nspec: {inbox: {}}\n"},
            "line 1, page: spec.inbox: a relay has no page. Use a recipient of kind file",
        ),
        (
            {
                "a.yaml": HEAD + "kind: Maintenance\nmetadata: {name: disks}\n"
                "spec: {start: 2026-01-01T00:00, duration: 1h, tz: UTC, reason: new, scope: {volumes: [a]}}\n"
            },
            "disks: kind Maintenance is for a server. A relay takes Recipient, Route, Silence",
        ),
    ],
)
def test_what_cannot_be_in_force_is_named(folder: Folder, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        folder.write(name, text)
    with pytest.raises(ConfigError) as refused:
        read_documents(folder.place)
    assert said in str(refused.value)


def test_one_file_will_do(folder: Folder) -> None:
    folder.write("a.yaml", RECIPIENT % ("pager", "pager") + "---\n" + ROUTE % "pager")
    table = read_documents(folder.place / "a.yaml")
    assert (list(table.recipients), [each.name for each in table.routes]) == (["pager"], ["all"])


def test_a_folder_that_is_not_there_is_named(folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"documents: .*gone cannot be read: No such file"):
        read_documents(folder.place / "gone")
