"""Two cooperating servers without sockets, threads and time: engines, cores, and bytes between them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.events import pair_history
from sla_server.events.event import Event
from sla_server.events.pair_core import BatchesUnderWay, PairCore, how_far
from sla_server.events.pair_ledger import PartnerLedger
from sla_server.events.pair_session import MirrorSession
from sla_server.events.pair_store import MirrorStore, PartnerNotes
from sla_server.events.recipients.base import CONFIRMED, Answer
from tests.support.deliveries import InlineSender, Rig, ToAll
from tests.support.faulty_disk import FaultDisk

STORE_BYTES = 1 << 20
SILENCE_S = 10.0


@dataclass(frozen=True)
class Named:
    name: str
    partner: str
    silence_s: float = SILENCE_S


class PartnerServer:
    """One of the two.

    Attributes:
        raised: kinds of the events about its partner. is_up: whether it runs.
        is_main_loop_busy: the main loop does not come to what the other thread has left for it.
        got: by recipient, the identities in the order in which it got them, over all lives of the server.
    """

    def __init__(
        self,
        folder: Path,
        names: Named,
        recipients: Sequence[str],
        clock: FakeClock,
        store_bytes: int = STORE_BYTES,
        **settings: Any,
    ) -> None:
        self.names = names
        self.clock = clock
        self.store_bytes = store_bytes
        self.raised: list[str] = []
        self._details: list[dict[str, Any]] = []
        self.certificate_ends_us: int | None = None
        self.is_up = True
        self.is_main_loop_busy = False
        self.got: dict[str, list[str]] = {name: [] for name in recipients}
        folder.mkdir(exist_ok=True)
        senders = [InlineSender(name) for name in recipients]
        self.rig = Rig(folder, ToAll(*recipients), senders, clock=clock, **settings)
        self.open()

    def open(self) -> None:
        rig = self.rig
        storage = rig.disk.open("partner"), rig.disk.open("partner.index")
        self.store = MirrorStore(rig.folder, self.store_bytes, storage, self.clock)
        self.ledger = PartnerLedger(PartnerNotes.read(rig.folder))
        self.is_settled = False
        self.under_way = BatchesUnderWay()
        queues = rig.initial, rig.main
        self.core = PairCore(
            self.names,
            rig.folder,
            queues,
            rig.later.queue,
            pair_history.begin(
                rig.folder, {queue.queue_id: queue.newest_record for queue in (*queues, rig.later.queue)}
            ),
            self.store,
            self.ledger,
            self._raise,
            self.clock,
            settled=self._settled,
            certificate_ends_us=lambda: self.certificate_ends_us,
        )
        rig.engine.set_partner(self.ledger.decide)
        self._reported = len(rig.rows)

    def _settled(self) -> None:
        self.is_settled = True

    def _raise(self, kind: str, severity: str, text: str, details: dict[str, Any]) -> None:
        self.raised.append(kind)
        self._details.append(details)

    def events_of(self, kind: str) -> list[int]:
        """The numbers of events that events of a kind speak of."""
        raised = zip(self.raised, self._details, strict=True)
        return [details["events"] for each, details in raised if each == kind]

    def add(self, *events: Event) -> None:
        self.rig.add(*events)

    def answers(self, recipient: str, answer: Answer | None = CONFIRMED) -> None:
        """What the recipient says from now on; None: nothing, what is under way stays so."""
        self.rig.senders[recipient].answer = answer

    def run(self) -> None:
        """Both threads, until there is nothing to do now."""
        if not self.is_up:
            return
        self.core.step()
        if not self.is_settled:  # the process waits for it before its first delivery
            return
        self.look()
        self.rig.run()
        self.look()
        self.rig.run()
        self.ledger.report(self.rig.rows[self._reported :])
        self._reported = len(self.rig.rows)
        later, queues = self.rig.later, (self.rig.initial, self.rig.main)
        noticed = self.ledger.noticed
        self.core.reached = how_far(
            queues, later.queue, later.seqs(), self.rig.engine, noticed, self.names.partner
        )
        self.core.step()
        for name, sender in self.rig.senders.items():
            self.got[name] += sender.got()
            sender.batches.clear()

    def look(self) -> None:
        if self.is_main_loop_busy:
            return
        while self.core.later_items:
            self.rig.later.take_over(self.core.later_items.popleft())
        lanes, changed = self.rig.engine.lanes, self.ledger.take_change()
        if self.under_way.must_compose(lanes, has_changed=changed):
            self.rig.engine.set_router(self.rig.router)

    def kill(self) -> None:
        self.is_up = False

    def restart(self, *, disk_is_lost: bool = False) -> None:
        """As the next process finds it after a kill."""
        if disk_is_lost:
            for path in self.rig.folder.iterdir():
                path.unlink()
            self.rig.disk = type(self.rig.disk)()
        for sender in self.rig.senders.values():
            sender.back.clear()
        self.rig.restart()
        self.open()
        self.is_up = True


class DiskCopy:
    """What is on the disk of a server now.

    Args:
        server: of which.
        folder: not there; takes the files that are on no modelled disk.
    """

    def __init__(self, server: PartnerServer, folder: Path) -> None:
        self._disk: FaultDisk = copy.deepcopy(server.rig.disk)
        self._folder = folder
        shutil.copytree(server.rig.folder, folder)

    def restore(self, server: PartnerServer) -> None:
        """Put it in place of what a server that is down has there."""
        server.rig.disk = copy.deepcopy(self._disk)
        for path in server.rig.folder.iterdir():
            path.unlink()
        shutil.copytree(self._folder, server.rig.folder, dirs_exist_ok=True)


class Partners:
    """Both, and the link.

    Attributes:
        is_cut: no byte passes, in neither way.
    """

    def __init__(self, folder: Path, recipients: Sequence[str] = ("r",), **settings: Any) -> None:
        self.clock = FakeClock()
        self.a = PartnerServer(folder / "a", Named("a", "b"), recipients, self.clock, **settings)
        self.b = PartnerServer(folder / "b", Named("b", "a"), recipients, self.clock, **settings)
        self.is_cut = False
        self._links: dict[str, tuple[MirrorSession, MirrorSession]] = {}

    def run(self, seconds: float = 1.0) -> None:
        """Let time pass, a tenth of a second a step."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self._connect()
            for _ in range(20):
                self.a.run()
                self.b.run()
                if not self._pump():
                    break

    def exchange(self) -> None:
        """What the two threads say to each other at once, without the main loop of either server."""
        self._connect()
        while self._pump():
            self.a.core.step()
            self.b.core.step()

    def lose(self) -> None:
        """As long as it takes for a silent partner to be lost."""
        self.run(SILENCE_S + 1)

    def cut(self) -> None:
        """No byte passes any more, and neither side is told."""
        self.is_cut = True

    def mend(self) -> None:
        self.is_cut = False
        self.disconnect()

    def disconnect(self) -> None:
        for key, (origin, keeper) in list(self._links.items()):
            one, other = (self.a, self.b) if key == "a" else (self.b, self.a)
            one.core.ended(origin)
            other.core.ended(keeper)
        self._links.clear()

    def kill(self, server: PartnerServer) -> None:
        server.kill()
        self.disconnect()

    def of_recipient(self, name: str) -> list[str]:
        """What a recipient got from both."""
        return self.a.got[name] + self.b.got[name]

    def _connect(self) -> None:
        if self.is_cut or not (self.a.is_up and self.b.is_up):
            for server in (self.a, self.b):
                server.core.dial_failed()
            return
        for key, one, other in (("a", self.a, self.b), ("b", self.b, self.a)):
            if key not in self._links:
                self._links[key] = one.core.dialled(), other.core.accepted()

    def _pump(self) -> bool:
        moved = False
        for key, (origin, keeper) in list(self._links.items()):
            one, other = (self.a, self.b) if key == "a" else (self.b, self.a)
            for sender, target, owner in ((origin, keeper, other), (keeper, origin, one)):
                if not sender.outgoing:
                    sender.refill()
                data = bytes(sender.outgoing)
                sender.outgoing.clear()
                if not data or self.is_cut:
                    continue
                moved = True
                for raw in frame.split(data):
                    if frame.decode(raw).kind != Kind.MIRROR_BEAT:
                        owner.rig.disk.count()  # a server may die before each message that it receives
                    target.received(bytes(raw))
                    owner.core.heard()
        return moved
