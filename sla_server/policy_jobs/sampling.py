"""Which volumes of a large fleet the back-test replays by themselves.

Of a backend with more than ``MOST_VOLUMES`` volumes: those under a promise, the largest others by demand, and
some of the rest drawn at random; all that is left is added up and replayed as one neighbour. It has their
load, but no cap of theirs. Of more than ``MOST_PROMISED`` volumes under promises so many are drawn.

Deterministic: who is drawn follows from a seed, which is made of the caps that are tested.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sla_server.db.queries.replay import StreamSample
from sla_server.rows import Row

MOST_VOLUMES: Final = 64
"""Of a backend; with 16 backends that are 1,024, and an hour of them some 60,000 rows."""
MOST_PROMISED: Final = 32
DRAWN: Final = 8
"""Of the rest, so that not only the largest are replayed."""
SEED_BYTES: Final = 16
Covers = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class BackendSample:
    """What is replayed of a backend, for the report.

    Attributes:
        backend: its name.
        volumes: it has.
        replayed: of them by themselves; the others are added up.
        promised: of those replayed, under a promise.
        capped_left: with a cap, but among those that are added up.
    """

    backend: str
    volumes: int
    replayed: int
    promised: int
    capped_left: int

    @property
    def words(self) -> str:
        """For people."""
        text = (
            f"Backend {self.backend} has {self.volumes} volumes: {self.replayed} are replayed by themselves "
            f"({self.promised} under promises, then the largest and some drawn), the others as one neighbour"
        )
        left = f". {self.capped_left} of those have caps, which do not act in the replay"
        return text + (left if self.capped_left else "") + "."


def seed_of(caps: Iterable[Mapping[str, Any]]) -> bytes:
    """Digest of what is tested, in whatever order it comes: a sum of digests, as there may be millions."""
    total = 0
    for row in caps:
        text = repr((str(row["volume"]), int(row["hour_of_week"]), row["cost_per_s"]))
        total += int.from_bytes(hashlib.blake2b(text.encode(), digest_size=SEED_BYTES).digest(), "big")
    return (total % (1 << (8 * SEED_BYTES))).to_bytes(SEED_BYTES, "big")


def sample_streams(
    streams: Mapping[int, Row],
    backends: Collection[str],
    covers: Covers,
    capped: Collection[str],
    demands: Mapping[str, float],
    seed: bytes,
) -> tuple[StreamSample, list[BackendSample]]:
    """Choose, of some backends.

    Args:
        streams: of the whole fleet.
        backends: those to be replayed; streams of others are left out.
        covers: whether a volume's client is under a promise.
        capped: volumes with a cap.
        demands: cost rate of each volume; one without is the smallest.
        seed: for those that are drawn.
    """
    of_backend: dict[str, dict[str, list[int]]] = {backend: {} for backend in backends}
    for number, stream in streams.items():
        if (volumes := of_backend.get(stream["backend"])) is not None:
            volumes.setdefault(stream["volume"], []).append(number)
    instead: dict[int, int] = {}
    added_up: dict[int, Row] = {}
    found = []
    for place, (backend, volumes) in enumerate(sorted(of_backend.items()), 1):
        promised = {
            volume
            for volume, numbers in volumes.items()
            if any(covers(volume, streams[number]["client"]) for number in numbers)
        }
        chosen = _chosen(volumes, promised, demands, seed)
        instead.update((n, n if v in chosen else -place) for v, numbers in volumes.items() for n in numbers)
        if len(chosen) < len(volumes):
            name = f"others-of-{backend}"
            added_up[-place] = {"volume": name, "client": "others", "backend": backend, "gateway": name}
        left = len(set(capped).intersection(volumes) - chosen)
        found.append(BackendSample(backend, len(volumes), len(chosen), len(promised & chosen), left))
    return StreamSample(instead, added_up), found


def _chosen(
    volumes: Collection[str], promised: Collection[str], demands: Mapping[str, float], seed: bytes
) -> set[str]:
    if len(volumes) <= MOST_VOLUMES:
        return set(volumes)

    def rank(volume: str) -> bytes:
        return hashlib.blake2b(volume.encode(), key=seed, digest_size=8).digest()

    def size(volume: str) -> tuple[float, str]:
        return -demands.get(volume, 0.0), volume

    chosen = set(sorted(promised, key=rank)[:MOST_PROMISED])
    others = sorted((volume for volume in volumes if volume not in promised), key=size)
    chosen.update(others[: MOST_VOLUMES - DRAWN - len(chosen)])
    drawn = sorted((volume for volume in volumes if volume not in chosen), key=rank)
    return chosen.union(drawn[: MOST_VOLUMES - len(chosen)])
