"""A task of the agent: makes the stream of transactions, and ends what sessions have left of them (C10, C15).

Accounts of producers and consumers have transactions, but may neither make that stream nor remove anything
from it, and what they may not consume they cannot see gone. So each node makes passes as a session of the
product does (``transaction_recovery``), at its own times; several at once do no harm.

The stream is made once there are accounts, and ``_DMQ``, which they may not make either. Without any accounts
the first session that needs them makes them.

State: none that outlives it. Thread: the agent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final

from nats.aio.client import Client

from pmdaemon.runtime.clock import Clock, Deadline
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Catalogue, Destination
from sla_server.cluster.messages.errors import DestinationDiffers
from sla_server.cluster.messages.link import BorrowedLink
from sla_server.cluster.messages.session import TRANSACTIONS_BYTES
from sla_server.cluster.messages.transaction_recovery import STEP_S, TransactionRecovery, pause_s
from sla_server.cluster.messages.transaction_register import TransactionRegister

LOOK_S: Final = 1.0
"""So soon after the first account there is what it may not make."""


class TransactionKeeper:
    """See the module.

    Args:
        node: its name.
        replicas: copies of the stream, if there is none.
        has_accounts: whether the nodes share any.
        clock: which time of an open transaction is up.
    """

    def __init__(self, node: str, replicas: int, has_accounts: Callable[[], bool], clock: Clock) -> None:
        self._node = node
        self._replicas = replicas
        self._has_accounts = has_accounts
        self._clock = clock
        self._chance = random.Random()  # noqa: S311 - spreads passes, hides nothing

    async def run(self, client: Client) -> None:
        """Go on until something fails; then it may be called again.

        Raises:
            ClusterError, nats.errors.Error, OSError: of the engine.
        """
        link = BorrowedLink(client, self._node)
        catalogue = Catalogue(link, self._replicas)
        catalogue.find_abilities()
        register = TransactionRegister(
            link, catalogue, self._node, self._replicas, TRANSACTIONS_BYTES, self._clock
        )
        recovery = TransactionRecovery(link, register)
        is_made = False
        while True:
            result = await recovery.recover()
            pause = Deadline(pause_s(result) * self._chance.uniform(0.5, 1.5))
            while not pause.passed:
                if not is_made and self._has_accounts():
                    await register.make(STEP_S)
                    with contextlib.suppress(DestinationDiffers):  # a session has made it
                        await catalogue.create(Destination(names.DEAD_MESSAGES, replicas=self._replicas))
                    is_made = True
                await asyncio.sleep(LOOK_S)
