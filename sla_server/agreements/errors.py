"""Errors of the agreements package.

    SlaError (pmdaemon.errors)
    └── AgreementsRefused     one or more documents cannot be applied; carries every ``DocumentProblem`` found

A ``DocumentProblem`` says where (line, field), what is wrong and what to do, so that all of a file's mistakes
are reported at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pmdaemon.errors import SlaError


@dataclass(frozen=True, slots=True)
class DocumentProblem:
    """One mistake in a document.

    Attributes:
        line: 1-based line in the text given, 0 when no single line is to blame
        field: dotted path, e.g. ``spec.objectives[0].demand_curve[1].up_to_iops``; empty for the whole
            document
        problem: what is wrong
        fix: what to do about it
        document: ``metadata.name`` if known
    """

    line: int
    field: str
    problem: str
    fix: str = ""
    document: str = ""

    def as_dict(self) -> dict[str, object]:
        """For answers (messages.md, ``apply``)."""
        return asdict(self)

    def __str__(self) -> str:
        """One line for a terminal."""
        where = ", ".join(
            part for part in (f"line {self.line}" if self.line else "", self.document, self.field) if part
        )
        return f"{where}: {self.problem}" + (f". {self.fix}" if self.fix else "")


class AgreementsRefused(SlaError):
    """Documents were not applied; none of them, even if only one is wrong."""

    exit_status = 65  # EX_DATAERR

    def __init__(self, problems: list[DocumentProblem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(problem) for problem in problems))


def double_named(kind: str, name: str, line: int, first_line: int) -> DocumentProblem:
    """The problem of a document whose name another one of its kind has, in the same text or file."""
    return DocumentProblem(
        line,
        "metadata.name",
        f"the {kind} document at line {first_line} has this name already",
        "Give each document of a kind its own name",
        name,
    )
