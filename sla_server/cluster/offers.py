"""Asks the other servers whether they could act, answers when they ask, and has the lease given up.

The question is the command ``could-act`` (``commands``): nobody keeps it, so an answer is of this moment. It
is asked only while this server has trouble that has lasted long enough (``giving_up``), each ``ASK_S`` at
most. A node of a former release, or without a server, does not know the command, so it offers nothing.

Once it is decided the lease is published as not held (``lease.json``): the supervisor ends the parts that
act, as when the lease is lost, and says so (``acting_file``). Then ``LeaseKeeper`` hands the lease back.

Thread: ``node-agent``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog
from nats.aio.client import Client

from sla_server.acting_file import ActingFile
from sla_server.cluster import commands
from sla_server.cluster.giving_up import GivingUp, Offer, Situation
from sla_server.cluster.leases import ClusterLease

if TYPE_CHECKING:
    from sla_server.db.reach import DatabaseReach

log = structlog.get_logger("cluster")
COULD_ACT: Final = "could-act"
SETTING: Final = "cluster.takeover.give_up_after_s"
LOOK_S: Final = 0.5
ASK_S: Final = 5.0
ANSWER_S: Final = 2.0


class StandInOffers:
    """See the module.

    Args:
        node: this server's.
        identity: of the cluster.
        lease: as this server sees it.
        giving_up: the decision.
        reach: of the database.
        parts: what the supervisor says.
        publish: writes what holds of the lease now.
        raise_event: with text and details.
        boot_ns: the clock of the lease.
        now_ns: the monotonic clock, of all else.
    """

    def __init__(
        self,
        node: str,
        identity: str,
        lease: ClusterLease,
        giving_up: GivingUp,
        reach: DatabaseReach,
        parts: ActingFile,
        publish: Callable[[ClusterLease], None],
        raise_event: Callable[[str, Mapping[str, str | int]], None],
        *,
        boot_ns: Callable[[], int],
        now_ns: Callable[[], int],
    ) -> None:
        self._node = node
        self._identity = identity
        self._lease = lease
        self._giving_up = giving_up
        self._reach = reach
        self._parts = parts
        self._publish = publish
        self._raise_event = raise_event
        self._boot_ns = boot_ns
        self._now_ns = now_ns
        self._ask_again_ns = 0
        self._is_kept = False

    async def answer(self, _arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """To another server: whether this one could act in its place."""
        reach = self._reach.state()
        return {"reached_s": reach.reached_s, "why_not": self._why_not()}

    async def run(self, client: Client) -> None:
        """Look again and again; a question that fails ends the round, and the agent comes again."""
        while True:
            await self._round(client)
            await asyncio.sleep(LOOK_S)

    async def _round(self, client: Client) -> None:
        now, now_ns = self.situation(), self._now_ns()
        self._giving_up.follow(now, now_ns)
        reason = self._giving_up.trouble(now, now_ns)
        if not reason:
            self._is_kept = False
            return
        if now_ns < self._ask_again_ns:
            return
        self._ask_again_ns = now_ns + round(ASK_S * 1e9)
        answers = await commands.ask(client, COULD_ACT, {}, limit_s=ANSWER_S)
        self.decide([_offer(row) for row in answers.rows if row.node != self._node])

    def decide(self, offers: list[Offer]) -> None:
        """With the answers of the others, and what this server knows now."""
        now = self.situation()
        reason = self._giving_up.trouble(now, self._now_ns())
        if not self._giving_up.decide(now, offers, self._now_ns()):
            if reason and not self._is_kept:
                self._is_kept = True
                found = {offer.node: offer.why_not or f"since {offer.reached_s:.0f} s" for offer in offers}
                log.warning("lease-kept", problem=f"this server {reason}", no_other_could_act=found)
            return
        successor = self._giving_up.successor
        log.warning("lease-given-up", reason=reason, setting=SETTING, to=successor)
        self._publish(self._lease)
        text = f"the server of node {self._node} gives the lease up to that of node {successor}: it {reason}"
        self._raise_event(text, {"successor": successor, "reason": reason})

    def situation(self) -> Situation:
        """What this server knows of itself now."""
        reach, parts = self._reach.state(), self._parts.read()
        failing = min(parts.failing, key=lambda part: part.since_ns, default=None) if parts else None
        return Situation(
            self._lease.is_held(self._boot_ns()),
            reach.away_s,
            reach.reached_s,
            reach.problem,
            (self._now_ns() - failing.since_ns) / 1e9 if failing else 0.0,
            f"{failing.name} ended {failing.ends} times: {failing.reason}" if failing else "",
            parts is not None and parts.fence is None,
        )

    def _why_not(self) -> str:
        reach = self._reach.state()
        if self._lease.is_held(self._boot_ns()):
            return "it acts"
        if not reach.reached_s:
            return f"it does not reach the database: {reach.problem or 'no answer'}"
        if reach.found.cluster != self._identity:
            return "the database that it reaches is not that of the servers of this cluster"
        return reach.found.problem or self._giving_up.why_not()


def _offer(row: commands.NodeAnswer) -> Offer:
    """The answer of one node; one that does not know the command offers nothing."""
    if row.problem:
        return Offer(row.node, 0.0, row.problem)
    try:
        return Offer(row.node, float(row.result["reached_s"]), str(row.result["why_not"]))
    except (KeyError, TypeError, ValueError) as exc:
        return Offer(row.node, 0.0, f"its answer is not understood: {exc!r}")
