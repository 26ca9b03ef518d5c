"""What ``make bench-sla`` puts on one backend: who has a promise, who is greedy, what happens to the storage.

The modelled disk does 400 I/Os of 4 KiB a second (eight at once, 20 ms each); nbdkit does one at a time, 3 ms
each (filters ``noparallel`` and ``delay``). ``direct`` is the storage of this machine: each I/O moves a block
of a file with O_DIRECT, one at a time, large enough to take 2.5 ms; others may use it, too, so no goal rests
on it, and where a file system takes no O_DIRECT it is left out. Traces are replayed by their arrival times,
stretched, 4 KiB an I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from tests.support.stage import GOLD_IOPS, GREEDY_DEPTH, PROMISE_MS

TRACES: Final = Path(__file__).parents[1] / "tests" / "fixtures" / "traces"
DISK_IOPS: Final = 400
BURST_S: Final = 1.5  # of a bursty neighbour: 1,000 I/Os, more than the disk does in that time
PAUSE_S: Final = 2.5
MODEST_IOPS: Final = 60.0  # of all neighbours that ask for little: with the victims' a third of the storage
WINDOW_IOS: Final = 25.0  # what a window of a poll needs (window_min_ios), and a margin
FAULT_S: Final = 30.0
"""How long storage hangs or fails."""

Event = Literal["", "slower", "hangs", "fails"]
Backend = Literal["modelled", "nbdkit", "direct"]
PROMISES_MS: Final[dict[Backend, float]] = {"modelled": PROMISE_MS, "nbdkit": 20.0, "direct": 40.0}
"""By backend, what is promised there: some ten times what it takes for an I/O."""


@dataclass(frozen=True)
class Client:
    """One application and its volume.

    Attributes:
        volume: its name, or VOLUME@CLIENT for one of several clients of a volume.
        gateway: through which it goes.
        rate_iops: Poisson arrivals a second, 0 for none.
        depth: outstanding I/Os of a closed loop, 0 for none.
        trace: replayed instead, a name of ``TRACE_GAPS``.
    """

    volume: str
    gateway: str = "gateway-a"
    rate_iops: float = 0.0
    depth: int = 0
    trace: str = ""

    @property
    def target(self) -> list[str]:
        """The volume, and which client of it, as arguments of ``sla throttle``."""
        volume, _, client = self.volume.partition("@")
        return [volume, "--client", client] if client else [volume]

    def gaps_s(self) -> Iterator[float] | None:
        """Seconds before each I/O of its trace; None without one."""
        return TRACE_GAPS[self.trace]() if self.trace else None


@dataclass(frozen=True)
class Scenario:
    """One situation, on a backend of its own.

    Attributes:
        victims: have a promise of p95 <= ``promise_ms`` and stay within its demand curve.
        greedy: best-effort neighbours.
        is_bursty: which goals hold.
        event: what happens to the storage half way through enforcing.
        interval_s: between polls of a gateway.
        is_variant: of a scenario with another backend, by ``on_backend``; no goal rests on it.
    """

    name: str
    title: str
    victims: tuple[Client, ...]
    greedy: tuple[Client, ...]
    is_bursty: bool = False
    event: Event = ""
    backend: Backend = "modelled"
    promise_ms: float = PROMISE_MS
    interval_s: float = 1.0
    is_variant: bool = False

    @property
    def has_fault(self) -> bool:
        """Whether the storage hangs or fails, which no cap can mend."""
        return self.event in ("hangs", "fails")

    @property
    def is_steady(self) -> bool:
        """Whether victims and storage behave alike all the time."""
        return not self.event and not self.is_bursty

    @property
    def modest(self) -> tuple[Client, ...]:
        """Its neighbours, asking for little: MODEST_IOPS of all."""
        rate_iops = MODEST_IOPS / len(self.greedy)
        return tuple(replace(client, rate_iops=rate_iops, depth=0, trace="") for client in self.greedy)

    @property
    def gateways(self) -> dict[str, list[str]]:
        """Volumes by gateway."""
        found: dict[str, list[str]] = {}
        for client in (*self.victims, *self.greedy):
            volumes = found.setdefault(client.gateway, [])
            if (volume := client.volume.split("@")[0]) not in volumes:
                volumes.append(volume)
        return found

    @property
    def names_clients(self) -> bool:
        """Whether clients are told apart by the export that they ask for."""
        return any("@" in client.volume for client in (*self.victims, *self.greedy))

    @property
    def has_goals(self) -> bool:
        """Whether the goals are about it."""
        return self.backend != "direct" and not self.is_variant


def arrivals_s(name: str) -> list[float]:
    """Arrival times of a trace, from 0."""
    times = [int(line.split()[0]) / 1e9 for line in (TRACES / name).read_text().splitlines()]
    return [at - times[0] for at in times]


def _bursts() -> Iterator[float]:
    """1,000 requests of TPC-C in BURST_S, then PAUSE_S without any, again and again."""
    times = arrivals_s("tpcc-excerpt.trace")[:1000]
    stretch = BURST_S / times[-1]
    gaps = [(after - before) * stretch for before, after in itertools.pairwise(times)]
    return itertools.cycle([PAUSE_S, *gaps])


def _web_search() -> Iterator[float]:
    """Web search, stretched to GOLD_IOPS on average: its own bursts."""
    times = arrivals_s("wsrch-excerpt.trace")
    stretch = len(times) / GOLD_IOPS / times[-1]
    return itertools.cycle([(after - before) * stretch for before, after in itertools.pairwise(times)])


TRACE_GAPS: Final = {"tpcc-bursts": _bursts, "wsrch": _web_search}
_GOLD: Final = Client("erp-db", rate_iops=GOLD_IOPS)
_BATCH: Final = Client("batch", "gateway-b", depth=GREEDY_DEPTH)

SCENARIOS: Final = (
    Scenario("one-to-one", "one victim, one greedy neighbour", (_GOLD,), (_BATCH,)),
    Scenario(
        "nbdkit",
        "one victim, three greedy, before nbdkit",
        (_GOLD,),
        (_BATCH, *(Client(volume, "gateway-b", depth=GREEDY_DEPTH) for volume in ("scrub", "scan"))),
        backend="nbdkit",
        promise_ms=PROMISES_MS["nbdkit"],
    ),
    Scenario(
        "direct",
        "one victim, two greedy, on a file with O_DIRECT",
        (_GOLD,),
        (_BATCH, Client("scrub", "gateway-b", depth=GREEDY_DEPTH)),
        backend="direct",
        promise_ms=PROMISES_MS["direct"],
    ),
    Scenario(
        "many",
        "three victims, four greedy, two gateways",
        tuple(
            Client(f"db-{n}", gateway, rate_iops=30)
            for n, gateway in enumerate(("gateway-a", "gateway-b", "gateway-a"))
        ),
        tuple(
            Client(f"batch-{n}", gateway, depth=GREEDY_DEPTH // 4)
            for n, gateway in enumerate(("gateway-a", "gateway-b") * 2)
        ),
    ),
    Scenario(
        "bursty-greedy",
        "a greedy neighbour in bursts (TPC-C trace)",
        (_GOLD,),
        (Client("batch", "gateway-b", trace="tpcc-bursts"),),
        is_bursty=True,
    ),
    Scenario(
        "bursty-victim",
        "a victim in bursts (web search trace)",
        (Client("erp-db", trace="wsrch"),),
        (_BATCH,),
        is_bursty=True,
    ),
    Scenario(
        "one-volume",
        "a victim and a greedy client of one volume",
        (Client("erp-db@host-a", rate_iops=GOLD_IOPS),),
        (Client("erp-db@batch", depth=GREEDY_DEPTH),),
    ),
    Scenario("slower", "the backend becomes 1.5 times slower", (_GOLD,), (_BATCH,), event="slower"),
    Scenario("hangs", "the backend hangs", (_GOLD,), (_BATCH,), event="hangs"),
    Scenario("fails", "every I/O of the backend fails", (_GOLD,), (_BATCH,), event="fails"),
    Scenario(
        "quick-polls",
        "one victim, one greedy, polled every 250 ms",
        (Client("erp-db", rate_iops=4 * WINDOW_IOS),),
        (_BATCH,),
        interval_s=0.25,
    ),
)


def on_backend(scenario: Scenario, backend: Backend) -> Scenario:
    """The same loads and events before other storage; itself where it has that already."""
    if backend == scenario.backend:
        return scenario
    title = f"{scenario.title}; on {backend}"
    return replace(
        scenario,
        name=f"{scenario.name}@{backend}",
        title=title,
        backend=backend,
        promise_ms=PROMISES_MS[backend],
        is_variant=True,
    )


def why_not_on(scenario: Scenario, backend: Backend) -> str:
    """Why a scenario cannot be had on a backend; "" if it can."""
    if scenario.event == "slower" and backend != "modelled":
        return f"{backend} cannot be made slower while it runs"
    if scenario.backend not in ("modelled", backend):
        return f"it is about {scenario.backend}"
    return ""


def matrix(names: Sequence[str], backends: Sequence[Backend]) -> Iterator[tuple[Scenario, str]]:
    """Scenarios to run, each with why it cannot be; none of ``backends``: each on its own."""
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        for backend in backends or (scenario.backend,):
            yield on_backend(scenario, backend), why_not_on(scenario, backend)
