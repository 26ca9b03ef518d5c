"""A task of the agent: makes the stream of transactions, and ends what sessions have left of them (C10, C15).

Accounts of producers and consumers have transactions, but may neither make that stream nor remove anything
from it, and what they may not consume they cannot see gone. So each node makes passes as a session of the
product does (``transaction_recovery``), at its own times; several at once do no harm.

The stream is made once there are accounts. Without any its first transaction makes it.

State: none that outlives it. Thread: the agent's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from nats.aio.client import Client

from pmdaemon.runtime.clock import Clock
from sla_server.cluster.messages.catalogue import Catalogue
from sla_server.cluster.messages.link import BorrowedLink
from sla_server.cluster.messages.session import TRANSACTIONS_BYTES
from sla_server.cluster.messages.transaction_recovery import STEP_S, TransactionRecovery, pause_s
from sla_server.cluster.messages.transaction_register import TransactionRegister


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
        while True:
            if self._has_accounts():
                await register.make(STEP_S)
            result = await recovery.recover()
            await asyncio.sleep(pause_s(result) * self._chance.uniform(0.5, 1.5))
