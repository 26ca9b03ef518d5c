"""The message system (C): a library for any Python program, on the cluster's engine.

``MessageSession`` is what a program opens; ``Destination`` is a queue or topic. Producers, consumers and
handlers come from the session. docs/design/cluster-messages.md says how it works and what it promises.
"""

from sla_server.cluster.messages.catalogue import Destination, DestinationKind
from sla_server.cluster.messages.consumer import Consumer
from sla_server.cluster.messages.credit import BlockedBy
from sla_server.cluster.messages.feed import Received
from sla_server.cluster.messages.producer import Producer
from sla_server.cluster.messages.session import MessageSession
from sla_server.cluster.messages.transaction import Transaction

__all__ = [
    "BlockedBy",
    "Consumer",
    "Destination",
    "DestinationKind",
    "MessageSession",
    "Producer",
    "Received",
    "Transaction",
]
