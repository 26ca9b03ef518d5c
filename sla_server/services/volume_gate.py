"""What of the gateways' announcements goes on to control and thresholds: the volumes that are their own.

The gate keeps what each gateway announced, and applies the rule of ``sla_server.ownership`` to it at once: a
new volume counts before SQL says so. The database manager decides in the order of its queue; what it stored
is taken over (``learn``), which changes something only where two gateways showed a new volume in the same
moment. A decision of a person counts at once, too (``decide``).

After each change ``take`` says what is different: a ``GatewayChange`` for every gateway that is concerned.

Belongs to the main loop; no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final

from sla_server.ownership import (
    FIRST_SIGHT_VOLUMES,
    PENDING,
    REVOKED,
    Ownership,
    VolumeClaim,
    VolumeOwners,
    pending_text,
)
from sla_server.rows import Row, Rows
from sla_server.services.rows import audit_row, event_row

PROBLEM: Final = "volumes"
MOST_PROBLEMS: Final = 10
"""Gateways named one by one; of the others only the number."""
MOST_DECIDED: Final = 10_000
"""Claims of one request."""
MOST_WAITING: Final = 16_384
"""Streams of one gateway that do not count, as many as its pair announces at once; the oldest go."""
_RECORDED: Final = (
    "volume", "gateway_id", "name", "state", "backend", "shown_backend", "decided_by", "first_seen_us",
    "changed_us",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GatewayChange:
    """What of a gateway's volumes counts now.

    Attributes:
        exports: all that count; None: the gateway is not up.
        streams: that count now and did not before.
        gone: volumes that do not count any more.
        volumes: of all exports and streams that count.
    """

    gateway_id: str
    name: str
    exports: list[Row] | None
    streams: list[Row]
    gone: frozenset[str]
    volumes: frozenset[str]


class DecisionRefused(Exception):
    """What was asked for cannot be decided.

    Attributes:
        code: HTTP's.
        problem: what is wrong.
        fix: what to do.
    """

    def __init__(self, code: int, problem: str, fix: str) -> None:
        self.code, self.problem, self.fix = code, problem, fix
        super().__init__(problem)


@dataclass(slots=True)
class _Announced:
    """What a gateway announced: ``waiting`` are streams that do not count; ``own`` volumes that do."""

    name: str = ""
    is_up: bool = False
    exports: list[Row] = field(default_factory=list)
    waiting: dict[int, Row] = field(default_factory=dict)
    streams: dict[int, Row] = field(default_factory=dict)
    own: frozenset[str] = frozenset()


class VolumeGate:
    """See the module. ``owners``: the claims."""

    def __init__(
        self,
        mode: Ownership,
        claims: Iterable[VolumeClaim] = (),
        first_sight_volumes: int = FIRST_SIGHT_VOLUMES,
    ) -> None:
        self.owners = VolumeOwners(mode, claims, first_sight_volumes)
        self._gateways: dict[str, _Announced] = {}
        self._changed: dict[str, None] = {}

    # What is announced.

    def up(
        self,
        gateway_id: str,
        name: str,
        exports: Sequence[Row],
        listed: Sequence[str] | None,
        now_us: int,
        *,
        is_start: bool = False,
    ) -> GatewayChange:
        """A gateway registered, or its exports changed; what counts. At the start its list is not known."""
        known = self._gateways.setdefault(gateway_id, _Announced())
        known.name, known.is_up, known.exports = name, True, list(exports)
        if not is_start:
            self.owners.set_list(gateway_id, listed, now_us)
        self.owners.show(gateway_id, name, {e["volume"]: e["backend"] for e in exports}, now_us)
        if self.owners.has_list(gateway_id):  # streams may have come before it
            shown = {row["volume"]: row["backend"] for row in known.waiting.values()}
            self.owners.show(gateway_id, name, shown, now_us, exports=False)
        self._changed.pop(gateway_id, None)
        return self._admit(gateway_id, known)

    def streams(self, gateway_id: str, rows: Iterable[Row], now_us: int) -> list[Row]:
        """Streams of a gateway; those that count."""
        known, rows = self._gateways.setdefault(gateway_id, _Announced()), list(rows)
        shown = {row["volume"]: row["backend"] for row in rows}
        self.owners.show(gateway_id, known.name, shown, now_us, exports=False)
        found = []
        for row in rows:
            backend = self.owners.admitted(gateway_id, row["volume"], row["backend"])
            if backend is None:
                known.waiting[row["id"]] = row
                if len(known.waiting) > MOST_WAITING:
                    del known.waiting[next(iter(known.waiting))]
            else:
                known.waiting.pop(row["id"], None)
                if self.owners.mode != "open":
                    known.streams[row["id"]] = row
                found.append(row if backend == row["backend"] else {**row, "backend": backend})
        known.own |= {row["volume"] for row in found}
        return found

    def lost(self, gateway_id: str) -> None:
        """Its session ended."""
        if (known := self._gateways.get(gateway_id)) is not None:
            known.is_up = False

    # What changes what counts.

    def learn(self, claims: Iterable[VolumeClaim]) -> None:
        """Claims as SQL has them."""
        for claim in claims:
            before = self.owners.of(claim.volume).get(claim.gateway_id)
            self.owners.put(claim)
            if self.owners.mode == "open":
                continue
            if before is None or (before.state, before.backend) != (claim.state, claim.backend):
                self._changed[claim.gateway_id] = None

    def take(self) -> Iterator[GatewayChange]:
        """Gateways of which something else counts than before."""
        changed, self._changed = self._changed, {}
        for gateway_id in changed:
            if (known := self._gateways.get(gateway_id)) is not None:
                yield self._admit(gateway_id, known)

    def _admit(self, gateway_id: str, known: _Announced) -> GatewayChange:
        exports = []
        for export in known.exports:
            backend = self.owners.admitted(gateway_id, export["volume"], export["backend"])
            if backend is not None:
                exports.append(export if backend == export["backend"] else {**export, "backend": backend})
        back = {i: row for i, row in known.streams.items() if not self._is_own(gateway_id, row)}
        for stream_id in back:
            del known.streams[stream_id]
        new = {i: row for i, row in known.waiting.items() if self._is_own(gateway_id, row)}
        for stream_id in new:
            del known.waiting[stream_id]
        known.streams |= new
        known.waiting |= back
        streams = [
            {**row, "backend": self.owners.admitted(gateway_id, row["volume"], row["backend"])}
            for row in new.values()
        ]
        exported = {export["volume"] for export in exports}
        gone = frozenset(v for v in known.own if self.owners.admitted(gateway_id, v, "") is None)
        known.own = frozenset(exported | {row["volume"] for row in known.streams.values()})
        return GatewayChange(
            gateway_id, known.name, exports if known.is_up else None, streams, gone, known.own
        )

    def _is_own(self, gateway_id: str, row: Row) -> bool:
        return self.owners.admitted(gateway_id, row["volume"], row["backend"]) is not None

    # What people decide.

    def decide(
        self, volumes: Collection[str], gateways: Collection[str], who: str, now_us: int, *, approve: bool
    ) -> tuple[Rows, Row]:
        """Approve or revoke claims; returns what to record, and the answer.

        Args:
            volumes: names or patterns.
            gateways: names or ids; none: the one gateway that each volume waits for, or belongs to.
            who: for the audit log.
            now_us: wall clock.
            approve: else revoke.

        Raises:
            DecisionRefused: nothing fits, or it is not clear which gateway is meant; nothing was changed.
        """
        ids = self._meant(gateways)
        found = [
            claim for volume in volumes for claim in self._wanted(volume, gateways, ids, approve=approve)
        ]
        if len(found) > MOST_DECIDED:
            problem = f"that is {len(found)} volumes, the limit of one request is {MOST_DECIDED}"
            raise DecisionRefused(422, problem, "Name a narrower pattern")
        rows: Rows = []
        decided: list[VolumeClaim] = []
        for claim in dict.fromkeys(found):
            made = claim.approved(who, now_us) if approve else claim.revoked(who, now_us)
            decided.append(made)
            self.owners.put(replace(made, version=0))
            self._changed[made.gateway_id] = None
            rows.append(("volume_owners", {name: made.row()[name] for name in _RECORDED}))
        rows += self._said(found, decided, who, now_us, approve=approve)
        listed = [
            {"volume": c.volume, "gateway": c.name, "gateway_id": c.gateway_id, "backend": c.backend,
             "owners": self.owners.owners(c.volume)}
            for c in decided
        ]  # fmt: skip
        return rows, {"approved" if approve else "revoked": listed}

    def _meant(self, gateways: Collection[str]) -> set[str]:
        """Ids of gateways given by id, or by a name that is only one's.

        Raises:
            DecisionRefused: several have the name.
        """
        names, found = self.owners.names, set[str]()
        for given in gateways:
            if given in names or given in self._gateways:
                found.add(given)
                continue
            fits = sorted(gateway_id for gateway_id, name in names.items() if name == given)
            if len(fits) > 1:
                problem = f"{len(fits)} gateways are named {given}: {', '.join(fits)}"
                raise DecisionRefused(409, problem, "Name the one that is meant by its id: --gateway ID")
            found.update(fits)
        return found

    def _wanted(
        self, volume: str, gateways: Collection[str], ids: set[str], *, approve: bool
    ) -> Iterator[VolumeClaim]:
        """Claims that a request means by one name or pattern; ``ids`` of ``gateways``.

        Raises:
            DecisionRefused: none, or one name and several gateways.
        """
        is_pattern = any(character in volume for character in "*?")
        names = [v for v in self.owners.volumes() if fnmatchcase(v, volume)] if is_pattern else [volume]
        found = []
        for name in sorted(names):
            claims = self.owners.of(name).values()
            if gateways:
                chosen = [c for c in claims if c.gateway_id in ids]
                if approve and is_pattern:
                    chosen = [c for c in chosen if c.needs_approval]
            elif approve:
                chosen = [c for c in claims if c.needs_approval]
            else:
                chosen = [c for c in claims if c.state != REVOKED]
            if len(chosen) > 1 and not gateways:
                who = ", ".join(
                    sorted(
                        f"--gateway {c.gateway_id if self.owners.has_namesake(c) else c.name}" for c in chosen
                    )
                )
                problem = f"volume {name} is shown by {len(chosen)} gateways"
                raise DecisionRefused(409, problem, f"Say which is meant, one or several: {who}")
            found += chosen
        if not found and approve and gateways and not is_pattern:
            found = list(self._ahead(volume, ids))
        if not found:
            state = "waits for approval" if approve else "belongs to a gateway, or waits"
            of = f" at {', '.join(sorted(gateways))}" if gateways else ""
            raise DecisionRefused(
                404, f"no volume {volume!r} {state}{of}", "See 'sla volumes list', and 'sla get gateways'"
            )
        yield from found

    def _ahead(self, volume: str, ids: set[str]) -> Iterator[VolumeClaim]:
        """Claims of gateways that did not show the volume yet; none that have it already."""
        for gateway_id, known in self._gateways.items():
            if gateway_id in ids and gateway_id not in self.owners.of(volume):
                yield VolumeClaim(volume, gateway_id, known.name or gateway_id, PENDING, "", "")

    def _said(
        self,
        before: Sequence[VolumeClaim],
        decided: Sequence[VolumeClaim],
        who: str,
        now_us: int,
        *,
        approve: bool,
    ) -> Rows:
        """An audit row a volume, an event a gateway."""
        kind, word = ("volume-approved", "approved") if approve else ("volume-revoked", "revoked")
        by_volume: dict[str, list[VolumeClaim]] = {}
        by_gateway: dict[str, list[VolumeClaim]] = {}
        for claim in decided:
            by_volume.setdefault(claim.volume, []).append(claim)
            by_gateway.setdefault(claim.gateway_id, []).append(claim)
        rows: Rows = []
        for volume, claims in by_volume.items():
            had = [_shown(claim) for claim in before if claim.volume == volume]
            rows.append(
                audit_row(who, kind, volume, now_us, before=had, after=[_shown(claim) for claim in claims])
            )
        for gateway_id, claims in by_gateway.items():
            name, volumes = claims[0].name, [claim.volume for claim in claims]
            what = f"volume {volumes[0]}" if len(volumes) == 1 else f"{len(volumes)} volumes"
            text = f"{what} of gateway {self.owners.called(claims[0])} {word} by {who}"
            others = [each for each in self.owners.owners(volumes[0]) if each != name]
            if len(volumes) == 1 and others:
                text += f"; it also belongs to {', '.join(others)}"
            details = {"gateway_id": gateway_id, "volumes": volumes[:100], "count": len(volumes), "who": who}
            rows.append(event_row(kind, "info", "gateway", name, text, now_us, details))
        return rows

    # What is shown.

    def problems(self) -> list[Row]:
        """Gateways that are up and show volumes which need approval, as rows of ``health.Problems``."""
        asking: dict[str, list[VolumeClaim]] = {}
        for claim in self.owners.asking():
            known = self._gateways.get(claim.gateway_id)
            if known is not None and known.is_up and self.owners.mode != "open":
                asking.setdefault(claim.gateway_id, []).append(claim)
        rows = [
            {
                "process": claims[0].name,
                "what": PROBLEM,
                "since_us": min(claim.changed_us for claim in claims),
                "reason": pending_text(self.owners, claims),
            }
            for claims in asking.values()
        ]
        if more := rows[MOST_PROBLEMS:]:
            reason = f"{len(more)} more gateways show volumes that need approval: sla volumes pending"
            rows[MOST_PROBLEMS:] = [
                {"process": "gateways", "what": PROBLEM, "since_us": more[0]["since_us"], "reason": reason}
            ]
        return rows

    @property
    def announced(self) -> Mapping[str, frozenset[str]]:
        """Gateways, and the volumes of each that count."""
        return {gateway_id: known.own for gateway_id, known in self._gateways.items()}


def _shown(claim: VolumeClaim) -> Row:
    return {
        "gateway": claim.name, "gateway_id": claim.gateway_id, "state": claim.state, "backend": claim.backend
    }  # fmt: skip
