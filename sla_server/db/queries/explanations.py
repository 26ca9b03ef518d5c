"""What ``sla why`` asks of SQL: decisions, throttles, agreements, slices and episodes around one moment.

Statements only; ``reader`` runs them. "At" a moment means: begun by then, and not ended by then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, false, func, literal, or_, select, tuple_, union

from sla_server.db import schema
from sla_server.db.schema import DAY_US
from sla_server.rows import Row


def decisions_where(
    volume: str | None,
    victims: Collection[str],
    backend: str | None,
    kinds: Collection[str],
    from_us: int | None,
    until_us: int | None,
) -> list[ColumnElement[bool]]:
    """Conditions: about a volume, for a victim, or of a backend; from_us < at_us <= until_us."""
    table = schema.decisions
    wanted: list[ColumnElement[bool]] = []
    if volume is not None:
        wanted.append(table.c.volume == volume)
    if victims:
        wanted.append(table.c.victim.in_(sorted(victims)))
    if backend is not None:
        wanted.append(table.c.backend == backend)
    if kinds:
        wanted.append(table.c.kind.in_(sorted(kinds)))
    if from_us is not None:
        wanted.append(table.c.at_us > from_us)
    if until_us is not None:
        wanted.append(table.c.at_us <= until_us)
    return wanted


def cursor_of(decision: Row) -> str:
    """Where the page behind a decision begins, the newest first."""
    return f"{decision['at_us']}:{decision['decision_id']}:{decision['volume'] or ''}"


def behind(cursor: str) -> list[ColumnElement[bool]]:
    """Conditions: decisions behind one, the newest first."""
    table = schema.decisions
    at_us, _, names = cursor.partition(":")
    decision_id, _, volume = names.partition(":")
    place = tuple_(table.c.at_us, table.c.volume, table.c.decision_id)
    # The time alone, too: it is what an index is of.
    return [table.c.at_us <= int(at_us), place < (int(at_us), volume, decision_id)]


def decisions(wanted: list[ColumnElement[bool]], newest_first: bool, limit: int) -> Select[Any]:
    """Decisions for which all of ``wanted`` holds."""
    table = schema.decisions
    # A backend's step and the caps that follow from it have one time: the step, without a volume, came first.
    order = table.c.at_us, table.c.volume, table.c.decision_id
    directed = [column.desc() for column in order] if newest_first else list(order)
    return select(table).where(*wanted).order_by(*directed).limit(limit)


def throttles_at(
    volumes: Collection[str], victims: Collection[str], backends: Collection[str], at_us: int, limit: int
) -> Select[Any]:
    """Throttles that were in force; observed ones never were.

    Of these volumes, their groups and whole clients, for these victims, or of the loops of these backends.
    """
    table = schema.throttles
    by_loop = and_(table.c.source == "control", table.c.backend.in_(sorted(backends)))
    members = (table.c.members.contains(f'"{volume}"', autoescape=True) for volume in sorted(volumes))
    by_group = and_(table.c.volume == "", or_(false(), *members))
    about = or_(table.c.volume.in_(sorted(volumes)), table.c.victim.in_(sorted(victims)), by_loop, by_group)
    lasting = or_(table.c.released_us.is_(None), table.c.released_us > at_us)
    statement = select(table).where(
        about, table.c.requested_us <= at_us, lasting, table.c.state != "observed"
    )
    return statement.order_by(table.c.requested_us.desc(), table.c.throttle_id).limit(limit)


def agreements_at(at_us: int, name: str | None, after: str, limit: int) -> Select[Any]:
    """The version of each agreement that was in force, without its document; a page, by name."""
    table = schema.agreements
    wanted = table.c.name > after if name is None else table.c.name == name
    newest = (
        select(table.c.name, func.max(table.c.version).label("version"))
        .where(table.c.applied_us <= at_us, wanted)
        .group_by(table.c.name)
        .subquery()
    )
    columns = [column for column in table.c if column.name != "document"]
    statement = select(*columns).join(
        newest, and_(newest.c.name == table.c.name, newest.c.version == table.c.version)
    )
    lasting = or_(table.c.ended_us.is_(None), table.c.ended_us > at_us)
    return statement.where(lasting).order_by(table.c.name).limit(limit)


def slice_at(name: str, objective: str, at_us: int) -> Select[Any]:
    """The newest judged slice that began by then, newest revision; none lasts longer than a day."""
    table = schema.slices
    return (
        select(table)
        .where(
            table.c.name == name,
            table.c.objective == objective,
            table.c.start_us <= at_us,
            table.c.start_us > at_us - DAY_US,
        )
        .order_by(table.c.start_us.desc(), table.c.revision.desc())
        .limit(1)
    )


def episodes_until(name: str, objective: str, at_us: int, limit: int) -> Select[Any]:
    """Violations of an objective that began by then, newest first."""
    table = schema.episodes
    wanted = table.c.name == name, table.c.objective == objective, table.c.opened_us <= at_us
    return select(table).where(*wanted).order_by(table.c.opened_us.desc()).limit(limit)


def mode_rows(at_us: int, action: str = "mode") -> Select[Any]:
    """The newest change of mode by then, from the audit log; ``backend-mode``: of the backends' own modes."""
    table = schema.audit
    wanted = table.c.action == action, table.c.at_us <= at_us
    return select(table.c.after, table.c.at_us).where(*wanted).order_by(table.c.at_us.desc()).limit(1)


def backends_of(volumes: Collection[str]) -> Select[Any]:
    """Backends that these volumes were seen on last."""
    table = schema.volumes
    return select(table.c.backend).where(table.c.volume.in_(sorted(volumes))).distinct()


def kinds_of(name: str) -> Any:
    """Which of the two a name is of, or both, or neither."""
    volumes = select(literal("volume").label("kind")).where(schema.volumes.c.volume == name)
    agreed = select(literal("sla").label("kind")).where(schema.agreements.c.name == name)
    return union(volumes, agreed)


def known_names() -> Any:
    """Names of all volumes and of all agreements ever applied: (name, kind)."""
    volumes = select(schema.volumes.c.volume.label("name"), literal("volume").label("kind"))
    agreed = select(schema.agreements.c.name.label("name"), literal("sla").label("kind"))
    return union(volumes, agreed)
