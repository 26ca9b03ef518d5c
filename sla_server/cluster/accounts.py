"""Accounts of the message system: named users with roles, compiled to the engine's permissions (C15). Pure.

    admin               everything, commands to nodes included
    monitor             sees streams, consumers and ``_LOG``; no content of a destination
    producer:SELECTOR   sends to the destinations that it matches
    consumer:SELECTOR   receives from them; what it rejects goes to ``_DMQ``

Selectors are those of consumers (``names``). They are resolved over the catalogue, so a destination that
comes later is added to the permissions of the accounts that match it. What is not listed is refused by the
engine.

An account's secret is in the file that ``sla cluster account add`` writes for it, and in ``engine.conf`` of
the nodes, both of mode 0600. Between nodes, and in the documents that they share, it is sealed with a key
made of the cluster's own secrets.

Who may send or receive anything takes part in transactions: reads states and locks, and writes states, for
whoever comes upon one that is out of time rolls it back. So such accounts can end each other's transactions,
and with programs of their own forge a state; they cannot send or receive more by it. Locks are those of the
destinations that the account consumes. The stream of states is made and cleaned by nodes, and
``_DMQ`` made: who makes a stream may have the engine copy any other into it.

Destinations of one domain share a stream, so whoever may consume one of them can ask the engine for the
others. Answers to an account come under a prefix of its own, which no other may listen to.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sla_server.cluster.access import ADMIN, CONSUMER, MONITOR, PRODUCER, PRODUCT_USER, inbox_of
from sla_server.cluster.errors import BadAccount
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import (
    ANNOUNCEMENTS,
    BUCKET,
    Destination,
    DestinationKind,
    engine_name,
)
from sla_server.cluster.messages.errors import BadSelector
from sla_server.cluster.messages.mirror_records import BUCKET as MIRRORS
from sla_server.cluster.messages.transaction_records import STREAM as TRANSACTIONS
from sla_server.cluster.messages.transaction_records import lock_subject, state_subject
from sla_server.cluster.server_conf import ROUTE_USER, SYSTEM_USER, Secrets

DOCUMENT: Final = "accounts"
ROLES: Final = f"{ADMIN}, {MONITOR}, {PRODUCER}:SELECTOR or {CONSUMER}:SELECTOR"
SECRET_BYTES: Final = 24
MOST_ROLES: Final = 32
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_CATALOGUE: Final = f"KV_{BUCKET}"
_LOG: Final = names.stream_name("_LOG")
_DEAD: Final = names.stream_name(names.DEAD_MESSAGES)
_API: Final = "$JS.API."
_EVERYONE: Final = (
    "INFO",
    f"STREAM.INFO.{_CATALOGUE}",
    f"STREAM.MSG.GET.{_CATALOGUE}",
    f"DIRECT.GET.{_CATALOGUE}",
    f"DIRECT.GET.{_CATALOGUE}.>",
)
_MONITORS: Final = (
    "STREAM.NAMES",
    "STREAM.LIST",
    "STREAM.INFO.*",
    "CONSUMER.NAMES.*",
    "CONSUMER.LIST.*",
    "CONSUMER.INFO.*.*",
    f"STREAM.MSG.GET.KV_{MIRRORS}",  # figures of mirrors
    f"CONSUMER.CREATE.{_LOG}",
    f"CONSUMER.CREATE.{_LOG}.>",
    f"CONSUMER.MSG.NEXT.{_LOG}.*",
    f"CONSUMER.DELETE.{_LOG}.*",
)
_TRANSACTIONS: Final = (
    f"{_API}STREAM.NAMES",
    f"{_API}STREAM.INFO.{TRANSACTIONS}",
    f"{_API}STREAM.MSG.GET.{TRANSACTIONS}",
    state_subject("*"),
)


@dataclass(frozen=True, slots=True)
class Account:
    """One of them, as nodes share it.

    Attributes:
        sealed: its secret, for those who have the cluster's own.
    """

    name: str
    roles: tuple[str, ...]
    sealed: str


@dataclass(frozen=True, slots=True)
class User:
    """An account as one node's engine is given it.

    Attributes:
        publish, subscribe: subjects that are allowed; all others are not.
    """

    name: str
    secret: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def as_conf(self) -> dict[str, Any]:
        """The entry of the engine's file."""
        permissions = {"publish": {"allow": list(self.publish)}, "subscribe": {"allow": list(self.subscribe)}}
        return {"user": self.name, "password": self.secret, "permissions": permissions}


def check_name(name: str) -> None:
    """Refuse what cannot be an account.

    Raises:
        BadAccount: with the reason.
    """
    if not _NAME.fullmatch(name):
        raise BadAccount(name, "a name has 1 to 32 small letters, digits and -, and begins with a letter")
    if name in (PRODUCT_USER, SYSTEM_USER, ROUTE_USER):
        raise BadAccount(name, "the product has this user for itself; take another name")


def check_roles(name: str, roles: Sequence[str]) -> None:
    """Refuse what are no roles.

    Raises:
        BadAccount: names the one that is none.
        BadSelector: of a producer or consumer.
    """
    if not 1 <= len(roles) <= MOST_ROLES:
        raise BadAccount(name, f"an account has 1 to {MOST_ROLES} roles: {ROLES}")
    for role in roles:
        kind, colon, selector = role.partition(":")
        if kind in (ADMIN, MONITOR) and not colon:
            continue
        if kind not in (PRODUCER, CONSUMER) or not selector:
            raise BadAccount(name, f"{role!r} is no role; there are {ROLES}")
        names.Selector(selector)
        if selector.removeprefix(names.GLOB).removeprefix(names.REGEX).startswith("_"):
            raise BadAccount(name, f"{role!r}: reserved destinations are for {ADMIN} and {MONITOR}")


def accounts_of(body: Mapping[str, Any]) -> dict[str, Account]:
    """From the shared document; what this release cannot read is passed over."""
    found = {}
    for name, entry in body.items():
        try:
            account = Account(name, tuple(str(role) for role in entry["roles"]), str(entry["sealed"]))
            check_name(name)
            check_roles(name, account.roles)
        except (BadAccount, BadSelector, KeyError, TypeError):
            continue
        found[name] = account
    return found


def entry_of(account: Account) -> dict[str, Any]:
    """For the shared document."""
    return {"roles": list(account.roles), "sealed": account.sealed}


def new_secret() -> str:
    """Of an account."""
    return secrets.token_hex(SECRET_BYTES)


def seal(secret: str, own: Secrets) -> str:
    """``secret`` as only nodes of this cluster can read it."""
    from pmdaemon.pki import sealing

    return sealing.seal(secret, _key(own))


def unseal(sealed: str, own: Secrets) -> str:
    """What ``seal`` was given.

    Raises:
        BadAccount: it is sealed by another cluster, or damaged.
    """
    from pmdaemon.pki import sealing

    try:
        return sealing.unseal(sealed, _key(own))
    except ValueError as exc:
        raise BadAccount("?", "its secret cannot be read with the cluster's own; add it again") from exc


def _key(own: Secrets) -> bytes:
    text = "\0".join(("sla-cluster-accounts", own.system, own.product, own.route))
    return hashlib.sha256(text.encode()).digest()


def permissions(account: Account, destinations: Iterable[Destination]) -> tuple[list[str], list[str]]:
    """Subjects that it may publish to, and subscribe to."""
    if ADMIN in account.roles:
        return [">"], [">"]
    publish = [_API + subject for subject in _EVERYONE]
    subscribe = [f"{inbox_of(account.name)}.>", ANNOUNCEMENTS]
    known = [destination for destination in destinations if not destination.name.startswith("_")]
    for role in account.roles:
        kind, _, text = role.partition(":")
        if kind == MONITOR:
            publish += [_API + subject for subject in _MONITORS]
            continue
        selector = names.Selector(text)
        for destination in known:
            if selector.matches(destination.name):
                publish += _of_producer(destination) if kind == PRODUCER else _of_consumer(destination)
    return list(dict.fromkeys(publish)), subscribe


def _of_producer(destination: Destination) -> list[str]:
    return [destination.subject, f"{_API}STREAM.INFO.{destination.stream}", *_TRANSACTIONS]


def _of_consumer(destination: Destination) -> list[str]:
    stream, is_queue = destination.stream, destination.kind is DestinationKind.QUEUE
    calls = ("CONSUMER.INFO.{}.*", "CONSUMER.DURABLE.CREATE.{}.*", "CONSUMER.MSG.NEXT.{}.*", "STREAM.INFO.{}")
    return [
        *(_API + call.format(stream) for call in calls),
        f"$JS.ACK.{stream}.>",
        *_TRANSACTIONS,
        lock_subject(stream, engine_name(destination, "") if is_queue else "*", "*"),
        # What it rejects, and what was handed out too often, is stored in _DMQ by its own session.
        names.subject(names.DEAD_MESSAGES, names.DEAD_MESSAGES),
        f"{_API}STREAM.INFO.{_DEAD}",
    ]


def users(accounts: Iterable[Account], destinations: Sequence[Destination], own: Secrets) -> tuple[User, ...]:
    """All accounts for the engine, by name; one whose secret cannot be read is left out."""
    made = []
    for account in sorted(accounts, key=lambda account: account.name):
        try:
            secret = unseal(account.sealed, own)
        except BadAccount:
            continue
        publish, subscribe = permissions(account, destinations)
        made.append(User(account.name, secret, tuple(publish), tuple(subscribe)))
    return tuple(made)
