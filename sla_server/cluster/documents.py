"""Documents that all nodes share: acquirable parameters and accounts (C14, C15).

    cluster   bucket SLA_SHARED, one key a document     the order of changes: each one compares and sets
    node      DIRECTORY/NAME.json, mode 0600            what holds here, also before there is a majority

A document has a revision, one higher with each change. A change is stored in the bucket first, then sent to
all nodes as a command; a node takes what is newer than its own, writes its file (synced), and only then
answers. One that was away takes it from the nodes that run before its engine starts (``fetch``), or from the
bucket while it runs. So the highest revision wins everywhere, and a restart of all begins with the files.

What a crash can leave: the bucket ahead of the files; the nodes read it every few seconds. A bucket that was
lost is made again from the newest file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import nats.errors
import nats.js.api
import nats.js.errors
from nats.aio.client import Client

from sla_server.cluster import commands
from sla_server.cluster.admin import connect
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import ClusterRefused, ClusterUnreachable
from sla_server.cluster.membership import Membership
from sla_server.cluster.shared import NodeDocuments, SharedDocument

BUCKET: Final = "SLA_SHARED"
GET: Final = "documents.get"
TAKE: Final = "documents.take"
FETCH_S: Final = 2.0
ANSWER_S: Final = 5.0
TRIES: Final = 20


async def read(client: Client, name: str) -> tuple[SharedDocument, int]:
    """A document in the cluster, and the engine's number for it; revision 0 and 0 if there is none.

    Raises:
        nats.errors.Error, OSError, TimeoutError: the cluster does not say.
    """
    try:
        bucket = await client.jetstream(timeout=ANSWER_S).key_value(BUCKET)
        entry = await bucket.get(name)
    except (nats.js.errors.BucketNotFoundError, nats.js.errors.KeyNotFoundError):
        return SharedDocument(), 0
    try:
        return SharedDocument.parse(entry.value or b""), int(entry.revision or 0)
    except ValueError as exc:
        raise ClusterRefused(
            f"key {name} of the bucket {BUCKET}: {exc}. Delete the key, then repeat"
        ) from exc


async def write(client: Client, name: str, document: SharedDocument, number: int, replicas: int) -> bool:
    """Store a document in place of the one with ``number``; False if another one is there by now.

    Raises:
        nats.errors.Error, OSError, TimeoutError: perhaps stored.
    """
    stream = client.jetstream(timeout=ANSWER_S)
    try:
        bucket = await stream.key_value(BUCKET)
    except nats.js.errors.BucketNotFoundError:
        bucket = await stream.create_key_value(
            nats.js.api.KeyValueConfig(bucket=BUCKET, history=5, replicas=replicas)
        )
    try:
        if number:
            await bucket.update(name, document.encode().encode(), number)
        else:
            await bucket.create(name, document.encode().encode())
    except nats.js.errors.KeyWrongLastSequenceError:
        return False
    return True


async def newest(client: Client, name: str) -> tuple[SharedDocument, int]:
    """The document with the highest revision, of the bucket and of the nodes; and the bucket's number for it.

    A bucket that is lost may not be made again yet.

    Raises:
        nats.errors.Error, OSError, TimeoutError: the cluster does not say.
    """
    answers = await commands.ask(client, GET, {}, limit_s=ANSWER_S)
    stored, number = await read(client, name)
    found = [stored]
    for answer in answers.rows:
        with contextlib.suppress(KeyError, ValueError):
            found.append(SharedDocument.parse(answer.result[name]))
    return max(found, key=lambda document: document.revision), number


async def change(
    client: Client, name: str, changed: Callable[[Mapping[str, Any]], Mapping[str, Any]], replicas: int
) -> tuple[SharedDocument, commands.Answers]:
    """Change a document in the cluster, and have all nodes take it.

    Args:
        client: of the product's account.
        name: of the document.
        changed: the new body from the one that holds; may be called more than once.
        replicas: of the bucket, if there is none.

    Raises:
        ClusterRefused: there is no majority, or others change it at the same time, again and again.
    """
    for _ in range(TRIES):
        try:
            known, number = await newest(client, name)
            document = SharedDocument(known.revision + 1, changed(known.body))
            if await write(client, name, document, number, replicas):
                break
        except (OSError, TimeoutError, nats.errors.Error) as exc:
            problem = str(exc) or type(exc).__name__
            raise ClusterRefused(
                f"{name} of the cluster cannot be changed now: {problem}. A majority of the nodes must run; "
                "see 'sla cluster status', then repeat"
            ) from exc
    else:
        raise ClusterRefused(f"{name} of the cluster were changed by others {TRIES} times meanwhile; repeat")
    body = {"name": name, "document": document.encode()}
    return document, await commands.ask(client, TAKE, body, limit_s=ANSWER_S)


async def fetch(config: ClusterConfig, member: Membership, own: NodeDocuments) -> None:
    """Take what the running nodes have, if it is newer: before this node's engine starts.

    One peer that can be reached is enough: it passes the question to all, also without a majority. If none
    runs, the files hold.
    """
    for peer in config.peers:
        with contextlib.suppress(ClusterUnreachable, ClusterRefused):
            client = await connect(config, member, [peer.listen])
            try:
                answers = await commands.ask(client, GET, {}, limit_s=FETCH_S)
                own.take_all(answer.result for answer in answers.rows)
            finally:
                with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                    await client.close()
            return
