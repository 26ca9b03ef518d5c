"""What documents about delivery must fit with: each other, the catalogue of events, the agreements. Pure.

And the events that a person has sent to one recipient, which need its document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.agreements.promise import InForce
from sla_server.agreements.selectors import is_pattern, nearest
from sla_server.events.catalogue import ELEMENTS, KINDS, is_known
from sla_server.events.documents import EventMatch, RecipientDocument, RouteDocument, SilenceDocument
from sla_server.events.routing import RoutingTable
from sla_server.events.stages.route import AGAIN_KIND, TEST_KIND
from sla_server.events.stages.silence import SilenceInForce
from sla_server.requests import EventAgain
from sla_server.rows import Row
from sla_server.services.plans import Plans
from sla_server.services.rows import event_row

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


def test_event(name: str, who: str, now_us: int) -> tuple[str, Row]:
    """A person tries a recipient."""
    text = f"test of recipient {name}, asked for by {who}"
    return event_row(TEST_KIND, "info", "recipient", name, text, now_us, {"who": who})


def again_event(body: EventAgain, who: str, now_us: int) -> tuple[str, Row]:
    """A person has an event sent to a recipient again.

    It has an identity of its own: by that of the event which it repeats it would be dropped as known.
    """
    text = f"{body.text} (sent again by {who})"
    details = {**body.model_dump(exclude={"name", "text", "severity"}), "who": who}
    return event_row(AGAIN_KIND, body.severity, "recipient", body.name, text, now_us, details)


def why_it_takes_none(plans: Plans, name: str) -> tuple[int, str, str] | None:
    """Why a recipient takes no events, as an answer to a request; None: it does."""
    found = plans.get("Recipient", name)
    if found is None:
        return 404, f"no recipient {name!r} is in force", "See 'sla get recipients'"
    if isinstance(found.document, RecipientDocument) and found.document.spec.heartbeat is not None:
        fix = "'sla get recipients' shows whether its beats arrive"
        return 422, f"{name} is a heartbeat and takes no events", fix
    return None


def _named(document: object) -> Iterator[tuple[str, str]]:
    """(field, recipient) that a document about delivery names."""
    if isinstance(document, RecipientDocument):
        for index, name in enumerate(document.spec.fallback):
            yield f"spec.fallback[{index}]", name
    elif isinstance(document, RouteDocument):
        for index, name in enumerate(document.spec.recipients):
            yield f"spec.recipients[{index}]", name
        if document.spec.escalate is not None:
            for index, name in enumerate(document.spec.escalate.recipients):
                yield f"spec.escalate.recipients[{index}]", name
    elif isinstance(document, SilenceDocument):
        for index, name in enumerate(document.spec.recipients):
            yield f"spec.recipients[{index}]", name


def check(given: Sequence[Loaded], plans: Plans) -> None:
    """Refuse documents that name recipients which are not there, and two writers of one file.

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
                near = nearest(name, known) or ", ".join(known)
                fix = f"Use one of {near}, or apply" if known else "Apply"
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
    """Refuse to end a recipient that other documents name.

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


def warnings(
    given: Sequence[Loaded], plans: Plans, now_us: int, things: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """What may be a mistake in documents that can be applied.

    Args:
        given: those documents.
        plans: with them.
        now_us: wall clock.
        things: key of ``match`` (agreements, volumes) to the names that are there.
    """
    known = plans.names("Recipient")
    hearts = [
        item.name
        for item in plans.notifications
        if isinstance(item.document, RecipientDocument) and item.document.spec.heartbeat is not None
    ]
    for loaded in given:
        document = loaded.document
        yield from (f"{document.name}: {note}" for note in loaded.notes)
        if isinstance(document, RouteDocument | SilenceDocument):
            yield from (
                f"{document.name}: {said}"
                for said in _unmatched(document.spec.match, {**things, "elements": ELEMENTS})
            )
        if isinstance(document, RouteDocument | RecipientDocument):
            for name in dict.fromkeys(name for _, name in _named(document) if name in hearts):
                yield f"{document.name}: {name} is a heartbeat and takes no events"
        if isinstance(document, SilenceDocument) and _is_past(document, now_us):
            yield f"{document.name}: there is nothing of it after now, so it holds nothing back"
        if isinstance(document, Agreement) and known and document.spec.parties is not None:
            for name in document.spec.parties.recipients:
                if name not in known:
                    yield f"{document.name}: parties.recipients: there is no recipient {name!r}"


def _unmatched(match: EventMatch, things: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Entries of a match that fit nothing known: perhaps a typing error, perhaps of what is still to come.

    A server that knows no volume yet cannot tell; agreements are applied by people, as routes are.
    """
    for pattern in match.kinds:
        if not _is_kind(pattern):
            yield f"match.kinds: no event is of kind {pattern!r}{_did_you_mean(pattern, KINDS)}"
    for key, names in things.items():
        for pattern in getattr(match, key):
            is_there = pattern in names or any(fnmatchcase(name, pattern) for name in names)
            if not is_there and (names or key == "agreements"):
                said = f"match.{key}: no {key[:-1]} {pattern!r} is "
                said += "in force" if key == "agreements" else "known"
                yield said + _did_you_mean(pattern, names)


def _did_you_mean(name: str, known: Collection[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def _is_past(document: SilenceDocument, now_us: int) -> bool:
    return SilenceInForce(document).next_span(now_us, AHEAD_US) is None


def _is_kind(pattern: str) -> bool:
    if not is_pattern(pattern):
        return is_known(pattern)
    return any(fnmatchcase(kind, pattern) for kind in KINDS) or pattern.startswith("agent-")
