"""RECORD rows, which other processes ask to be kept, and rows of ``events``.

A row is checked when it arrives (so that its sender learns of a mistake at once) and stored by natural key:
columns it names are set, the others keep their values. Rows of one batch for the same key are merged in
order first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Table, case, update

from pmdaemon import reserve
from pmdaemon.reserve import raise_event
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.excerpt import excerpt, printable
from pmdaemon.wire.messages.stored import storable
from sla_server.audit_chain import PRUNED
from sla_server.db import audit, schema
from sla_server.db.errors import BadRecord
from sla_server.db.upsert import upsert
from sla_server.gateway_states import event_identity
from sla_server.rows import Row

_TABLES: Final = {name: schema.metadata.tables[name] for name in sorted(schema.RECORDABLE)}
_POLICY_COLUMNS: Final = frozenset(("version", "state"))
_LOST_COLUMNS: Final = frozenset(("gateway_id", "state", "reason", "last_seen_us"))
_CHAIN_COLUMNS: Final = frozenset(("seq", "digest"))
_INT_LIMIT: Final = {"Integer": 1 << 31, "BigInteger": 1 << 63}


class _Rule(NamedTuple):
    """What one column takes; ``limit`` of whole numbers, 0 of all else."""

    kind: type
    is_nullable: bool
    is_json: bool
    limit: int


def _rules_of(table: Table) -> dict[str, _Rule]:
    json_columns = schema.JSON_COLUMNS.get(table.name, ())
    return {
        column.name: _Rule(
            column.type.python_type,
            bool(column.nullable),
            column.name in json_columns,
            _INT_LIMIT.get(type(column.type).__name__, 0),
        )
        for column in table.columns
    }


_RULES: Final = {name: _rules_of(table) for name, table in _TABLES.items()}
_KEYS: Final = {name: schema.natural_key(table) for name, table in _TABLES.items()}


def event_row(identity: Sequence[object], at_us: int, kind: str, severity: str, **columns: Any) -> Row:
    """A row of ``events`` as SQL has it (details as text); its id follows from ``identity``."""
    event_id = event_identity(kind, identity)
    details = strict_json.dumps(columns.get("details", {}), separators=None, ensure_ascii=False)
    element, subject, text = (storable(columns.get(name, "")) for name in ("element", "subject", "text"))
    row = reserve.event_row(kind, severity, element, subject, text, at_us, event_id=event_id)
    return {**row, "details": storable(details)}


def check_row(table_name: object, row: object) -> tuple[str, Row]:
    """The table's name and the row as it will be stored.

    Raises:
        BadRecord: no such table for RECORD, no such column, no key, or a value of the wrong type.
    """
    if not isinstance(table_name, str) or table_name not in _TABLES:
        raise BadRecord(excerpt(table_name), f"RECORD writes only {', '.join(_TABLES)}")
    if not isinstance(row, Mapping):
        raise BadRecord(table_name, f"expected a map, got {type(row).__name__}")
    rules = _RULES[table_name]
    unknown = row.keys() - rules.keys()
    if unknown:
        raise BadRecord(
            table_name, f"no such column: {', '.join(sorted(printable(name, 60) for name in unknown))}"
        )
    if table_name == "audit" and row.keys() & _CHAIN_COLUMNS:
        raise BadRecord(table_name, "RECORD sets neither `seq` nor `digest`: the chain is the database's")
    if table_name == "audit" and row.get("action") == PRUNED:
        raise BadRecord(table_name, "RECORD says not that rows have left: the log's keeper alone does")
    if table_name == "policies" and set(row) != _POLICY_COLUMNS:
        raise BadRecord(table_name, "RECORD sets only `state`, by `version`")
    if table_name == "gateways" and (set(row) != _LOST_COLUMNS or row["state"] != "lost"):
        raise BadRecord(
            table_name, "RECORD sets only `state: lost` with `reason`, by `gateway_id` and `last_seen_us`"
        )
    for name in _KEYS[table_name]:
        if row.get(name) is None:
            raise BadRecord(table_name, f"the key column {name!r} is missing")
    return table_name, {name: _checked(table_name, name, rules[name], value) for name, value in row.items()}


def _checked(table_name: str, name: str, rule: _Rule, value: Any) -> Any:
    """One value as it will be stored."""
    kind, is_nullable, is_json, limit = rule
    if type(value) is int and -limit <= value < limit:  # most are
        return value
    if value is None:
        if is_nullable:
            return None
        if kind is str:
            return ""
        raise BadRecord(table_name, f"column {name!r} must not be null")
    if kind is str:
        if is_json and not isinstance(value, str):
            return storable(strict_json.dumps(value, separators=None, ensure_ascii=False, default=str))
        if isinstance(value, str):
            return storable(value)
    elif kind is bool:
        if isinstance(value, bool | int):
            return bool(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return _number(table_name, name, rule, value)
    raise BadRecord(table_name, f"column {name!r} takes {kind.__name__}, not {excerpt(value, 80)}")


def _number(table_name: str, name: str, rule: _Rule, value: float) -> float | None:
    if rule.kind is float:
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 1,024 bits
            number = math.inf
        if math.isfinite(number):
            return number
        if rule.is_nullable:
            return None
        raise BadRecord(table_name, f"column {name!r} takes a finite number, not {excerpt(value)}")
    limit = rule.limit
    if not math.isfinite(value) or value != int(value) or not -limit <= value < limit:
        raise BadRecord(
            table_name, f"column {name!r} takes a whole number below {limit}, not {excerpt(value)}"
        )
    return int(value)


def add_events(connection: Connection, rows: list[Row]) -> None:
    """Store events of this process, and raise them for delivery.

    They are raised although the transaction may still fail: what was noticed is true all the same, and tried
    again it mostly has the same identity.

    Raises:
        SQLAlchemyError: translated by the caller's ``engine.begin``.
    """
    for row in rows:
        raise_event(row)
    upsert(connection, schema.events, rows)


def store_rows(connection: Connection, rows: Sequence[tuple[str, Row]]) -> None:
    """Upsert checked rows in order.

    Raises:
        SQLAlchemyError: translated by the caller's ``engine.begin``.
    """
    merged: dict[str, dict[tuple[Any, ...], Row]] = {}
    for table_name, row in rows:
        key = tuple(row[name] for name in _KEYS[table_name])
        by_key = merged.setdefault(table_name, {})
        by_key[key] = {**by_key.pop(key, {}), **row}  # last, as of policies the last one pinned is
    for table_name, by_key in merged.items():
        if table_name == "policies":
            _set_policy_states(connection, list(by_key.values()))
            continue
        if table_name == "gateways":
            _set_lost(connection, list(by_key.values()))
            continue
        table = _TABLES[table_name]
        key_columns = set(_KEYS[table_name])
        by_columns: dict[tuple[str, ...], list[Row]] = {}
        for row in by_key.values():
            by_columns.setdefault(tuple(sorted(row)), []).append(row)
        for columns, same in by_columns.items():
            # An entry of the audit log that comes again is the one that is there: it takes no change.
            others = [] if table is schema.audit else [name for name in columns if name not in key_columns]
            upsert(connection, table, same, set_=others)
    if "audit" in merged:
        audit.chain(connection)


def _set_policy_states(connection: Connection, rows: Sequence[Row]) -> None:
    """Policies are inserted by the policy job alone; here their state changes. One at most is in force.

    One that was rejected is in force only while it is pinned, and rejected again once it is let go.
    """
    table = schema.policies
    is_pinned_all_the_same = table.c.state == schema.REJECTED_PINNED
    is_rejected = table.c.state.in_((schema.REJECTED, schema.REJECTED_PINNED))
    of_rejected = {"pinned": schema.REJECTED_PINNED, "in-force": schema.REJECTED}
    for row in rows:
        state = row["state"]
        if state in schema.POLICY_IN_FORCE:
            others = table.c.state.in_(schema.POLICY_IN_FORCE) & (table.c.version != row["version"])
            let_go = case((is_pinned_all_the_same, schema.REJECTED), else_="superseded")
            connection.execute(update(table).where(others).values(state=let_go))
        becomes = case((is_rejected, of_rejected.get(state, state)), else_=state)
        connection.execute(update(table).where(table.c.version == row["version"]).values(state=becomes))


def _set_lost(connection: Connection, rows: Sequence[Row]) -> None:
    """Gateways are stored as pairs report them; ``services`` adds those that never came back.

    One seen after ``last_seen_us`` did come back: the sender of the row did not know that yet.
    """
    table = schema.gateways
    for row in rows:
        unseen = (table.c.gateway_id == row["gateway_id"]) & (table.c.last_seen_us <= row["last_seen_us"])
        connection.execute(update(table).where(unseen).values(state="lost", reason=row["reason"]))
