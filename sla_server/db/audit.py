"""The audit log in SQL: rows get their place in the chain, and leave by age as the chain allows.

Triggers refuse every change of a row that has its place, and every deletion that no row ``audit-pruned``
announces (migration 0018). The only writer is the database manager's thread ``db-writer``, in the transaction
that stores the rows; so the chain has no branches.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select, update

from sla_server import audit_chain
from sla_server.db.schema import DAY_US, audit
from sla_server.rows import Row

CHAINED_ROWS: Final = 5_000
"""Of one call: an older release's log is chained over some transactions."""
PRUNED_ROWS: Final = 5_000
KEPT_ACTIONS: Final = ("mode", "backend-mode", "policy-mode")
"""What operators set holds until they set another: services start with the newest of these."""
NAMESPACE: Final = uuid.UUID("8d6f2c1e-53d2-4a56-9d0b-52f7f1a0c7e4")


def chain(connection: Connection) -> int:
    """Give rows that have none their place, oldest first; returns how many."""
    waiting = select(audit).where(audit.c.seq.is_(None)).order_by(audit.c.at_us, audit.c.audit_id)
    rows = connection.execute(waiting.limit(CHAINED_ROWS)).mappings().all()
    if not rows:
        return 0
    last = connection.execute(
        select(audit.c.seq, audit.c.digest)
        .where(audit.c.seq.is_not(None))
        .order_by(audit.c.seq.desc())
        .limit(1)
    ).first()
    seq, digest = (0, "") if last is None else (last[0], last[1])
    for found in rows:
        seq += 1
        row = {**found, "seq": seq}
        digest = audit_chain.digest_of(digest, row)
        is_it = audit.c.audit_id == row["audit_id"]
        connection.execute(update(audit).where(is_it).values(seq=seq, digest=digest))
    return len(rows)


def prune(connection: Connection, limit_us: int, now_us: int) -> bool:
    """Delete rows older than ``limit_us``; returns whether there may be more.

    Once a day of the log's time: each time leaves a row of its own. What operators set last stays.
    """
    chain(connection)
    ahead_us = 2 * now_us - limit_us  # written by a clock that was far ahead; its age would never come
    is_young = audit.c.at_us.between(limit_us, ahead_us)
    first_young = connection.execute(select(func.min(audit.c.seq)).where(is_young)).scalar()
    newest = connection.execute(select(func.max(audit.c.seq))).scalar() or 0
    through = (newest + 1 if first_young is None else first_young) - 1
    old = select(audit).where(audit.c.seq <= through).order_by(audit.c.seq).limit(PRUNED_ROWS)
    rows = [dict(row) for row in connection.execute(old).mappings()]
    kept_seqs = _kept(connection)
    leaving = [row for row in rows if row["seq"] not in kept_seqs]
    if not leaving or min(row["at_us"] for row in leaving) >= limit_us - DAY_US:
        return False
    last = rows[-1]
    known = _last_pruned(connection)
    digests = {row["seq"]: row["digest"] for row in rows}
    kept: dict[str, list[str]] = {}
    for row in rows:
        seq = row["seq"]
        if seq in kept_seqs:
            kept[str(seq)] = [digests.get(seq - 1) or _digest_before(seq, known), row["digest"]]
    after = {"through": last["seq"], "digest": last["digest"], "rows": len(leaving), "kept": kept}
    connection.execute(insert(audit), _pruned_row(after, now_us))
    chain(connection)
    connection.execute(delete(audit).where(audit.c.seq.in_([row["seq"] for row in leaving])))
    return len(rows) == PRUNED_ROWS


def _kept(connection: Connection) -> set[int]:
    """Numbers of the newest row of each action that services start with."""
    found = set()
    for action in KEPT_ACTIONS:
        newest = select(audit.c.seq).where(audit.c.action == action)
        seq = connection.execute(
            newest.order_by(audit.c.at_us.desc(), audit.c.audit_id.desc()).limit(1)
        ).scalar()
        if seq is not None:
            found.add(seq)
    return found


def _last_pruned(connection: Connection) -> dict[str, Any]:
    """What the last ``audit-pruned`` says: which row left last, and which before it were left standing."""
    newest = select(audit.c.after).where(audit.c.action == audit_chain.PRUNED).order_by(audit.c.seq.desc())
    text = connection.execute(newest.limit(1)).scalar()
    found: dict[str, Any] = json.loads(text) if text else {"through": 0, "digest": "", "kept": {}}
    return found


def _digest_before(seq: int, known: dict[str, Any]) -> str:
    """Digest of the row before this one, which has left: as the last one, or before one that was kept."""
    if seq - 1 == known["through"]:
        return str(known["digest"])
    return str(known["kept"].get(str(seq), [""])[0])


def _pruned_row(after: dict[str, Any], now_us: int) -> Row:
    return {
        "audit_id": str(uuid.uuid5(NAMESPACE, f"{after['through']}/{after['digest']}")),
        "at_us": now_us,
        "who": audit_chain.KEEPER,
        "action": audit_chain.PRUNED,
        "subject": str(after["through"]),
        "before": "null",
        "after": json.dumps(after),
    }
