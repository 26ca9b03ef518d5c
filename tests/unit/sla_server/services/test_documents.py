"""The reader of documents outlives what they do to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sla_server.agreements.errors import DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.events.recipients.config import NotifyConfig, NotifyDirectories
from sla_server.services import documents
from sla_server.services.documents import DocumentReader
from tests.support.agreements import simple


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), RecursionError(), MemoryError()])
def test_whatever_reading_raises_is_a_problem_of_that_document_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reader = DocumentReader()
    answers: list[tuple[list[Loaded], list[DocumentProblem]]] = []

    def then(read: list[Loaded], problems: list[DocumentProblem]) -> None:
        answers.append((read, problems))

    def broken(_text: str, _rollup_s: int) -> list[Loaded]:
        raise error

    with monkeypatch.context() as patched, capture_logs() as logged:
        patched.setattr(documents, "load_documents", broken)
        assert reader.submit("\ud800", 60, then)
        assert reader.step()
    assert [(row["event"], row["exc_info"]) for row in logged] == [("document-unreadable", True)]
    assert reader.submit(simple(), 60, then)
    assert reader.step()
    reader.deliver()
    ((nothing, (problem,)), ((loaded,), none)) = answers
    assert (nothing, none) == ([], [])
    assert type(error).__name__ in problem.problem
    assert problem.fix
    assert loaded.agreement.name


def test_a_recipient_comes_with_notes_of_what_it_misses(tmp_path: Path) -> None:
    head = "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {name: oncall}\n"
    text = f"{head}spec: {{webhook: {{url: 'https://a.example', secret_file: key}}}}\n"
    for directories, count in ((NotifyDirectories.of(NotifyConfig(), tmp_path), 1), (None, 0)):
        reader, found = DocumentReader(directories), list[Loaded]()
        assert reader.submit(text, 60, lambda read, _problems, into=found: into.extend(read))
        reader.step()
        reader.deliver()
        (loaded,) = found
        assert [str(tmp_path / "secrets" / "key") in note for note in loaded.notes] == [True] * count
