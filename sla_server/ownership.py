"""Which gateways a volume belongs to: the rule, as database manager and services both apply it.

A gateway *shows* a volume when it exports it, or announces a stream of it. A ``VolumeClaim`` is what is known
of one gateway that showed one volume: *approved* (the volume is its own, on that backend), *pending* (not
until a person approves it) or *revoked* (a person said no). Only an approved claim counts: of all others
nothing is stored as evidence, judged, or seen by control, and the gateway gets neither thresholds nor caps.

The setting ``volume_ownership`` decides what becomes of a volume that a gateway shows for the first time:

    first     approved if no gateway ever showed it and this one has no more than ``first_sight_volumes`` in
              this way, else pending: a gateway that makes names up cannot take all there are
    approve   pending
    open      all count, nothing is recorded

A gateway with a list in its certificate (``sla ca token NAME --volumes``) is approved for what is in it,
beside others too, and pending for everything else: also for what first sight or an earlier list gave it, not
for what a person did. A claim has a backend: an approved volume that is shown on another one goes on to count
on the one it was approved for, until that is approved, too.

The database manager decides, in the order of its queue, and stores claims in the transaction that stores what
was shown (``db.ingest.ownership``). ``services`` applies the same rule to the same announcements, so that it
need not wait for SQL, and takes over what SQL says (``services.volume_gate``).

Pure: no clock, no I/O. A ``VolumeOwners`` belongs to one thread; claims are values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, Self

Ownership = Literal["first", "approve", "open"]
APPROVED: Final = "approved"
PENDING: Final = "pending"
REVOKED: Final = "revoked"
FIRST_SIGHT: Final = "first sight"
CERTIFICATE: Final = "certificate"
UPDATE: Final = "update"
MOST_PENDING: Final = 4096
"""Of a gateway, kept as claims; more are not counted either, and no claim says so. A gateway exports 512."""
SHOWN: Final = 5
"""Names in a text."""
PATTERN_RE: Final = re.compile(r"([A-Za-z0-9._:@*?-]{1,128}/)?[A-Za-z0-9._:@*?-]{1,128}")
"""What a certificate may list: VOLUME, or BACKEND/VOLUME; ``*`` fits any letters, ``?`` one."""
MOST_PATTERNS: Final = 16
FIRST_SIGHT_VOLUMES: Final = 10_000
"""Default of the setting: far above the volumes of a real gateway, which exports 512 at a time."""


@dataclass(frozen=True, slots=True)
class VolumeClaim:
    """One gateway's claim to one volume, a row of ``volume_owners``.

    Attributes:
        name: of the gateway.
        state: APPROVED, PENDING or REVOKED.
        backend: what it was approved for; "" while it was not shown yet.
        shown_backend: what it was shown on last.
        decided_by: FIRST_SIGHT, CERTIFICATE, ``update`` (it was there before claims were) or a person.
        changed_us: when the state last changed, us UTC; ``first_seen_us``: when it was shown first.
        version: number of the change in the database; 0 while it is not from there.
    """

    volume: str
    gateway_id: str
    name: str
    state: str
    backend: str
    shown_backend: str
    decided_by: str = ""
    first_seen_us: int = 0
    changed_us: int = 0
    version: int = 0

    @property
    def has_moved(self) -> bool:
        """Whether it is shown on a backend that was not approved."""
        return self.state == APPROVED and bool(self.backend) and self.shown_backend not in ("", self.backend)

    @property
    def needs_approval(self) -> bool:
        """Whether somebody must decide."""
        return self.state == PENDING or self.has_moved

    def approved(self, who: str, now_us: int) -> VolumeClaim:
        """The same, approved with the backend it is shown on."""
        backend = self.shown_backend or self.backend
        return replace(
            self, state=APPROVED, backend=backend, shown_backend=backend, decided_by=who, changed_us=now_us
        )

    def revoked(self, who: str, now_us: int) -> VolumeClaim:
        """The same, revoked."""
        return replace(self, state=REVOKED, decided_by=who, changed_us=now_us)

    def row(self) -> dict[str, Any]:
        """Its columns."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """From the columns of a row."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})


Key = tuple[str, str]
"""Volume and gateway_id."""


class VolumeOwners:
    """All claims; see the module. ``mode`` and ``first_sight_volumes``: the settings."""

    def __init__(
        self,
        mode: Ownership,
        claims: Iterable[VolumeClaim] = (),
        first_sight_volumes: int = FIRST_SIGHT_VOLUMES,
    ) -> None:
        self.mode = mode
        self.first_sight_volumes = first_sight_volumes
        self._by_volume: dict[str, dict[str, VolumeClaim]] = {}
        self._asking: dict[Key, None] = {}
        self._pending: Counter[str] = Counter()
        self._at_first_sight: Counter[str] = Counter()
        self._listed: dict[str, tuple[str, ...] | None] = {}
        self._names: dict[str, str] = {}
        for claim in claims:
            self.put(claim)

    def copy(self) -> VolumeOwners:
        """Another one, for changes that may not last."""
        made = VolumeOwners(self.mode, first_sight_volumes=self.first_sight_volumes)
        made._by_volume = dict(self._by_volume)  # what is inside is replaced, never changed
        made._asking, made._pending = dict(self._asking), Counter(self._pending)
        made._at_first_sight = Counter(self._at_first_sight)
        made._listed, made._names = dict(self._listed), dict(self._names)
        return made

    def with_claims(self, claims: Iterable[VolumeClaim]) -> VolumeOwners:
        """Another one with these claims alone; what certificates list stays."""
        made = VolumeOwners(self.mode, claims, self.first_sight_volumes)
        made._listed, made._names = dict(self._listed), made._names | self._names
        return made

    # Changes.

    def put(self, claim: VolumeClaim) -> None:
        """This is the claim now."""
        known = self._by_volume.get(claim.volume, {})
        before = known.get(claim.gateway_id)
        for each, count in ((before, -1), (claim, 1)):
            if each is not None:
                self._pending[claim.gateway_id] += count * (each.state == PENDING)
                self._at_first_sight[claim.gateway_id] += count * is_at_first_sight(each)
        self._names.setdefault(claim.gateway_id, claim.name)
        self._by_volume[claim.volume] = {**known, claim.gateway_id: claim}
        key = claim.volume, claim.gateway_id
        if claim.needs_approval:
            self._asking.setdefault(key)
        else:
            self._asking.pop(key, None)

    def set_list(self, gateway_id: str, patterns: Sequence[str] | None, now_us: int) -> list[VolumeClaim]:
        """What its certificate lists; None: it has no list. Returns the claims it takes back."""
        listed = None if patterns is None else tuple(patterns)
        is_known, self._listed[gateway_id] = self._listed.get(gateway_id) == listed, listed
        if listed is None or is_known or self.mode == "open":
            return []
        found = [claims[gateway_id] for claims in self._by_volume.values() if gateway_id in claims]
        changed = [
            replace(claim, state=PENDING, backend="", decided_by="", changed_us=now_us)
            for claim in found
            if claim.state == APPROVED
            and claim.decided_by in (FIRST_SIGHT, CERTIFICATE)
            and not is_listed(listed, claim.volume, claim.backend)
        ]
        for claim in changed:
            self.put(claim)
        return changed

    def has_list(self, gateway_id: str) -> bool:
        """Whether ``set_list`` said what its certificate lists, if anything."""
        return gateway_id in self._listed

    def show(
        self, gateway_id: str, name: str, backends: Mapping[str, str], now_us: int, *, exports: bool = True
    ) -> list[VolumeClaim]:
        """A gateway shows volumes; returns the claims that are new or changed.

        Args:
            gateway_id: which one.
            name: of it; "" if that is not known here.
            backends: volume to the backend it is on.
            now_us: wall clock.
            exports: they are of its exports. Streams stay announced with the backend they had first, so they
                make claims, and change none. Before ``set_list`` they are not approved at first sight, and
                make no claim: they are to be shown again after it.
        """
        if name:
            self._names[gateway_id] = name
        if self.mode == "open":
            return []
        changed = []
        for volume, backend in backends.items():
            before = self._by_volume.get(volume, {}).get(gateway_id)
            if before is None:
                claim = self._first_claim(volume, gateway_id, name, backend, now_us, exports=exports)
            elif exports:
                claim = self._shown_again(before, name or before.name, backend, now_us)
            else:
                claim = before
            if claim is not None and claim != before:
                self.put(claim)
                changed.append(claim)
        return changed

    def _first_claim(
        self, volume: str, gateway_id: str, name: str, backend: str, now_us: int, *, exports: bool
    ) -> VolumeClaim | None:
        claim = VolumeClaim(volume, gateway_id, name or gateway_id, PENDING, "", backend, "", now_us, now_us)
        patterns = self._listed.get(gateway_id)
        if patterns is not None:
            if is_listed(patterns, volume, backend):
                return claim.approved(CERTIFICATE, now_us)
        elif self.mode == "first" and volume not in self._by_volume and not self._is_full(gateway_id):
            return claim.approved(FIRST_SIGHT, now_us) if exports or self.has_list(gateway_id) else None
        return claim if self._pending[gateway_id] < MOST_PENDING else None

    def _is_full(self, gateway_id: str) -> bool:
        """Whether a gateway owns all that it may at first sight."""
        return self._at_first_sight[gateway_id] >= self.first_sight_volumes

    def _shown_again(self, claim: VolumeClaim, name: str, backend: str, now_us: int) -> VolumeClaim:
        claim = replace(claim, name=name, shown_backend=backend)
        patterns = self._listed.get(claim.gateway_id)
        if claim.needs_approval and patterns is not None and is_listed(patterns, claim.volume, backend):
            return claim.approved(CERTIFICATE, now_us)
        if claim.state == APPROVED and not claim.backend:
            return replace(claim, backend=backend)
        return claim

    # Questions.

    def admitted(self, gateway_id: str, volume: str, backend: str) -> str | None:
        """The backend on which a volume that a gateway shows on ``backend`` counts; None: it does not."""
        if self.mode == "open":
            return backend
        claim = self._by_volume.get(volume, {}).get(gateway_id)
        if claim is None or claim.state != APPROVED:
            return None
        return claim.backend or backend

    def of(self, volume: str) -> Mapping[str, VolumeClaim]:
        """Claims to a volume, by gateway_id."""
        return self._by_volume.get(volume, {})

    def owners(self, volume: str) -> list[str]:
        """Names of the gateways that it belongs to, sorted."""
        return sorted(claim.name for claim in self.of(volume).values() if claim.state == APPROVED)

    def volumes(self) -> Iterable[str]:
        """Volumes that somebody claimed."""
        return self._by_volume.keys()

    def asking(self) -> list[VolumeClaim]:
        """Claims that somebody must decide on, the oldest first."""
        return [self._by_volume[volume][gateway_id] for volume, gateway_id in self._asking]

    @property
    def names(self) -> Mapping[str, str]:
        """Names of gateways by gateway_id."""
        return self._names

    def has_namesake(self, claim: VolumeClaim) -> bool:
        """Whether the name of its gateway is also another one's, or another one's id."""
        alike = (claim.name in named for named in self._names.items() if named[0] != claim.gateway_id)
        return any(alike)

    def called(self, claim: VolumeClaim) -> str:
        """How a text names its gateway: with the id if it has a namesake."""
        return f"{claim.name} ({claim.gateway_id})" if self.has_namesake(claim) else claim.name

    def is_beyond(self, claim: VolumeClaim) -> bool:
        """Whether a claim is pending because its gateway owns all that it may at first sight."""
        has_rule = self.mode == "first" and self._listed.get(claim.gateway_id) is None
        is_new = claim.state == PENDING and not self.owners(claim.volume)
        return has_rule and is_new and self._is_full(claim.gateway_id)

    def why(self, claim: VolumeClaim) -> str:
        """Why a claim needs to be approved, after "gateway G shows volume V, "."""
        if claim.has_moved:
            return f"which is its own on backend {claim.backend}, on backend {claim.shown_backend}"
        if others := [name for name in self.owners(claim.volume) if name != claim.name]:
            return f"which belongs to {enumerated(others)}"
        if self._listed.get(claim.gateway_id) is not None:
            return "which its certificate does not list"
        if self.owners(claim.volume):
            return "which belongs to another gateway of that name"
        if self.is_beyond(claim):
            most = f"{self.first_sight_volumes:,}"
            return f"which no gateway owns, and it has {most} that it showed first (first_sight_volumes)"
        return "which no gateway owns"


def is_at_first_sight(claim: VolumeClaim) -> bool:
    """Whether a volume is a gateway's own because it showed it first."""
    return claim.state == APPROVED and claim.decided_by == FIRST_SIGHT


def is_listed(patterns: Iterable[str], volume: str, backend: str) -> bool:
    """Whether a certificate's list (``PATTERN_RE``) has a volume on a backend."""
    for pattern in patterns:
        on_backend, _, name = pattern.rpartition("/")
        if fnmatchcase(volume, name) and fnmatchcase(backend, on_backend or "*"):
            return True
    return False


def enumerated(names: Sequence[str]) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def pending_text(owners: VolumeOwners, claims: Sequence[VolumeClaim]) -> str:
    """What to say of claims of one gateway, at least one, that need to be approved."""
    first, name = claims[0], owners.called(claims[0])
    meant = first.gateway_id if owners.has_namesake(first) else first.name
    if len(claims) == 1:
        counts = f"It counts on {first.backend} only" if first.has_moved else "It does not count"
        return (
            f"gateway {name} shows volume {first.volume}, {owners.why(first)}. {counts}, until: "
            f"sla volumes approve {first.volume} --gateway {meant}"
        )
    volumes = enumerated([claim.volume for claim in claims])
    if any(owners.is_beyond(claim) for claim in claims):
        volumes += f" (it has {owners.first_sight_volumes:,} that it showed first: first_sight_volumes)"
    return (
        f"gateway {name} shows {len(claims)} volumes that need approval: {volumes}. They do not count, or "
        f"not on that backend, until: sla volumes approve VOLUME --gateway {meant} "
        "(sla volumes pending lists them)"
    )
