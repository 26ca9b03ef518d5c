"""Commands to nodes, on ``_ADMIN`` (C12, C13): to one, some or all, and how many answers to expect.

    sla.d.__ADMIN._ADMIN.all          every node
    sla.d.__ADMIN._ADMIN.node.NAME    one

A command is a message that no one keeps: one that is not carried out now must not be carried out an hour
later, when a node comes back and its sender has gone. Each answer names its node and says how many nodes run,
so the asker knows how many answers to expect and waits no longer; the one of a node that does not run comes
from the engine at once. Only the product's own user and accounts with the role ``admin`` may publish there.

Whatever runs in a node registers its commands in the ``CommandTable`` of its agent.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import nats.errors
import structlog
from nats.aio.client import Client

from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import Deadline
from sla_server.cluster.errors import UNREADABLE, ClusterRefused
from sla_server.cluster.messages import names

log = structlog.get_logger("cluster")
SUBJECT: Final = names.subject("_ADMIN", "_ADMIN")
ALL: Final = f"{SUBJECT}.all"
ANSWER_S: Final = 5.0
Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


def subject_of(node: str) -> str:
    """Where commands for one node are published."""
    return f"{SUBJECT}.node.{node}"


def is_asked(reply: str) -> bool:
    """Whether an asker waits at ``reply``.

    What the engine itself delivers here, for a consumer that named this subject, has another one: it comes
    from an account that may receive, and not command.
    """
    return reply.startswith("_INBOX")


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """Of one node to one command.

    Attributes:
        expected: nodes that it knows to run.
        problem: why it was not done; "" if it was.
    """

    node: str
    expected: int = 1
    result: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    def encode(self) -> bytes:
        """As the message."""
        return json.dumps(
            {"node": self.node, "expected": self.expected, "result": self.result, "problem": self.problem}
        ).encode()

    @classmethod
    def parse(cls, data: bytes) -> NodeAnswer:
        """From the message.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(data)
            return cls(
                str(found["node"]), int(found["expected"]), dict(found["result"]), str(found["problem"])
            )
        except UNREADABLE as exc:
            raise ValueError(f"no answer to a command: {exc!r}") from exc


@dataclass(frozen=True, slots=True)
class Answers:
    """Of the nodes that were asked, by name.

    Attributes:
        expected: how many there should be.
    """

    rows: tuple[NodeAnswer, ...]
    expected: int

    @property
    def missing(self) -> int:
        """How many have not come."""
        return max(0, self.expected - len(self.rows))

    @property
    def is_done(self) -> bool:
        """Whether all have done it."""
        return not self.missing and not any(row.problem for row in self.rows)


class CommandTable:
    """Commands of one node, by name."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._handlers: dict[str, Handler] = {}

    def register(self, command: str, handler: Handler) -> None:
        """Have ``handler`` carry out ``command``: given its arguments, it returns the result."""
        if command in self._handlers:
            raise ValueError(f"the command {command} is registered twice")
        self._handlers[command] = handler

    async def carry_out(self, data: bytes, expected: int) -> NodeAnswer:
        """Answer one message."""
        try:
            found = json.loads(data)
            command, arguments = str(found["command"]), dict(found["arguments"])
        except UNREADABLE as exc:
            return NodeAnswer(self._node, expected, {}, f"no command: {exc!r}")
        handler = self._handlers.get(command)
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            return NodeAnswer(self._node, expected, {}, f"there is no command {command!r}; there are {known}")
        try:
            return NodeAnswer(self._node, expected, await handler(arguments))
        except (SlaError, OSError, *UNREADABLE) as exc:  # whoever asks waits for the answer
            log.warning("cluster-command-failed", command=command, problem=repr(exc))
            return NodeAnswer(self._node, expected, {}, f"{command}: {exc}")


async def ask(
    client: Client,
    command: str,
    arguments: Mapping[str, Any],
    *,
    nodes: Iterable[str] = (),
    limit_s: float = ANSWER_S,
) -> Answers:
    """Have nodes carry out a command.

    Args:
        client: of the product's account, or of one with the role ``admin``.
        command: its name.
        arguments: of JSON.
        nodes: their names; none: all that run.
        limit_s: for answers of nodes that hang.

    Raises:
        ClusterRefused: the connection breaks.
    """
    wanted = list(dict.fromkeys(nodes))
    body = json.dumps({"command": command, "arguments": dict(arguments)}).encode()
    rows: dict[str, NodeAnswer] = {}
    try:
        inbox = client.new_inbox()
        subscription = await client.subscribe(f"{inbox}.*")
        for node in wanted:
            await client.publish(subject_of(node), body, reply=f"{inbox}.{node}")
        if not wanted:
            await client.publish(ALL, body, reply=f"{inbox}.all")
        deadline, expected = Deadline(limit_s), len(wanted) or 1
        while len(rows) < expected:
            try:
                message = await subscription.next_msg(timeout=max(0.001, deadline.left_s()))
            except (TimeoutError, nats.errors.TimeoutError):
                break
            if (message.headers or {}).get("Status") == "503":  # of the engine
                if not wanted:
                    break
                node = message.subject.rpartition(".")[2]
                rows[node] = NodeAnswer(node, 1, {}, "it does not run, or its engine has just started")
                continue
            answer = NodeAnswer.parse(message.data)
            rows[answer.node] = answer
            expected = len(wanted) or max(expected, answer.expected)
        await subscription.unsubscribe()
    except (TimeoutError, OSError, nats.errors.Error) as exc:
        raise ClusterRefused(f"{command}: {str(exc) or type(exc).__name__}") from exc
    return Answers(tuple(rows[name] for name in sorted(rows)), expected)
