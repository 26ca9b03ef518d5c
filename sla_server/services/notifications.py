"""What documents about delivery must fit with: each other, the catalogue of events, the agreements. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.agreements.promise import InForce
from sla_server.agreements.selectors import is_pattern
from sla_server.events.catalogue import KINDS, is_known
from sla_server.events.documents import RecipientDocument, RouteDocument, SilenceDocument
from sla_server.events.routing import RoutingTable
from sla_server.events.stages.silence import SilenceInForce
from sla_server.services.plans import Plans

AHEAD_US: Final = 5 * 366 * 86_400_000_000
"""How far ahead the next occurrence of a silence is looked for."""


def table_of(plans: Plans, items: Sequence[InForce]) -> RoutingTable:
    """What delivery has to know."""
    named: Mapping[str, Sequence[str]] = {
        item.name: parties.recipients
        for item in items
        if (parties := item.agreement.spec.parties) is not None and parties.recipients
    }
    return RoutingTable.of(plans.notifications, named)


def _named(document: object) -> Iterator[tuple[str, str]]:
    """(field, recipient) of a route or silence."""
    if isinstance(document, RouteDocument):
        for index, name in enumerate(document.spec.recipients):
            yield f"spec.recipients[{index}]", name
        if document.spec.escalate is not None:
            for index, name in enumerate(document.spec.escalate.recipients):
                yield f"spec.escalate.recipients[{index}]", name
    elif isinstance(document, SilenceDocument):
        for index, name in enumerate(document.spec.recipients):
            yield f"spec.recipients[{index}]", name


def check(given: Sequence[Loaded], plans: Plans) -> None:
    """Refuse routes and silences that name recipients which are not there, and two writers of one file.

    Args:
        given: documents to apply.
        plans: with them.

    Raises:
        AgreementsRefused: names those.
    """
    known = plans.names("Recipient")
    problems = list(_shared_files(given, plans))
    for loaded in given:
        for field, name in _named(loaded.document):
            if name not in known:
                near = difflib.get_close_matches(name, known, 3)
                fix = f"Use one of {', '.join(near or known)}, or apply" if known else "Apply"
                problems.append(
                    DocumentProblem(
                        loaded.line,
                        field,
                        f"there is no recipient {name!r}",
                        f"{fix} a Recipient document of this name, before or in the same file",
                        loaded.document.name,
                    )
                )
    if problems:
        raise AgreementsRefused(problems)


def _shared_files(given: Sequence[Loaded], plans: Plans) -> Iterator[DocumentProblem]:
    """Recipients to apply whose file another one writes and renames."""
    paths = [
        (item.name, item.document.spec.file.path)
        for item in plans.notifications
        if item.ended_us is None
        and isinstance(item.document, RecipientDocument)
        and item.document.spec.file is not None
    ]
    for loaded in given:
        document = loaded.document
        if not isinstance(document, RecipientDocument) or document.spec.file is None:
            continue
        path = document.spec.file.path
        for name in [name for name, other in paths if other == path and name != document.name][:1]:
            problem = f"the recipient {name!r} writes {path!r} already"
            yield DocumentProblem(
                loaded.line, "spec.file.path", problem, "Give another name of a file", document.name
            )


def check_unused(plans: Plans, name: str) -> None:
    """Refuse to end a recipient that routes or silences name.

    Raises:
        AgreementsRefused: names them.
    """
    users = [
        f"{item.document.kind.lower()} {item.name}"
        for item in plans.notifications
        if name in {named for _, named in _named(item.document)}
    ]
    if users:
        shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
        problem = f"the recipient {name!r} is named by {shown}"
        raise AgreementsRefused(
            [DocumentProblem(0, "", problem, "Apply these without it, or end them, first")]
        )


def warnings(given: Sequence[Loaded], plans: Plans, now_us: int) -> Iterator[str]:
    """What may be a mistake in documents that can be applied."""
    known = plans.names("Recipient")
    hearts = [
        item.name
        for item in plans.notifications
        if isinstance(item.document, RecipientDocument) and item.document.spec.heartbeat is not None
    ]
    for loaded in given:
        document = loaded.document
        if isinstance(document, RouteDocument | SilenceDocument):
            for pattern in document.spec.match.kinds:
                if not _is_kind(pattern):
                    near = difflib.get_close_matches(pattern, KINDS, 3)
                    did = f"; did you mean {' or '.join(near)}?" if near else ""
                    yield f"{document.name}: match.kinds: no event is of kind {pattern!r}{did}"
        if isinstance(document, RouteDocument):
            for name in dict.fromkeys(name for _, name in _named(document) if name in hearts):
                yield f"{document.name}: {name} is a heartbeat and takes no events"
        if isinstance(document, SilenceDocument) and _is_past(document, now_us):
            yield f"{document.name}: there is nothing of it after now, so it holds nothing back"
        if isinstance(document, Agreement) and known and document.spec.parties is not None:
            for name in document.spec.parties.recipients:
                if name not in known:
                    yield f"{document.name}: parties.recipients: there is no recipient {name!r}"


def _is_past(document: SilenceDocument, now_us: int) -> bool:
    return SilenceInForce(document).next_span(now_us, AHEAD_US) is None


def _is_kind(pattern: str) -> bool:
    if not is_pattern(pattern):
        return is_known(pattern)
    return any(fnmatchcase(kind, pattern) for kind in KINDS) or pattern.startswith("agent-")
