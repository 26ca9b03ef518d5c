"""The file of an account: what a program needs to connect as it. A secret, of mode 0600.

It has the addresses of the nodes, name and secret, and with TLS a certificate of the product's own authority,
without which no node lets it in. ``connection`` gives a ``MessageSession`` its ``urls`` and ``tls``.
"""

from __future__ import annotations

import json
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pmdaemon.pki import contexts
from pmdaemon.pki.authority import Authority
from sla_server.cluster import membership
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import BadInvitation

KIND: Final = "sla-cluster-account"
MOST_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class AccountConnection:
    """How to connect.

    Attributes:
        urls: of all nodes, with name and secret: for programs, never for a log.
        tls: None without TLS.
    """

    account: str
    urls: tuple[str, ...]
    tls: ssl.SSLContext | None


def text(config: ClusterConfig, account: str, secret: str, authority: Authority) -> str:
    """The file's content.

    Raises:
        PkiError: TLS is enabled, and there is no authority on this machine.
    """
    document = {
        "kind": KIND,
        "cluster": config.name,
        "account": account,
        "secret": secret,
        "nodes": [config.listen, *(peer.listen for peer in config.peers)],
        "tls": _certificates(config, account, authority),
    }
    return json.dumps(document, indent=1) + "\n"


def _certificates(config: ClusterConfig, account: str, authority: Authority) -> dict[str, str]:
    if not config.tls.enabled:
        return {}
    from pmdaemon.pki.certificates import pem_of_der

    return {
        membership.AUTHORITY: pem_of_der(authority.certificate_der()).decode(),
        membership.CERTIFICATE: authority.account_credential(account, config.tls.lifetime_s).decode(),
    }


def connection(path: Path) -> AccountConnection:
    """Read the file.

    Raises:
        BadInvitation: it is none, or others may read it.
        OSError: it cannot be read.
    """
    if path.stat().st_mode & 0o077:
        raise BadInvitation(path, f"other users may read it. Run: chmod 600 {path}")
    with path.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    try:
        found = json.loads(data)
        if len(data) > MOST_BYTES or found["kind"] != KIND:
            raise ValueError
        account, secret, nodes = str(found["account"]), str(found["secret"]), [str(n) for n in found["nodes"]]
        tls = _context(found["tls"]) if found["tls"] else None
    except (ValueError, KeyError, TypeError) as exc:
        raise BadInvitation(
            path, "is no file of an account; 'sla cluster account add NAME FILE' makes one on a node"
        ) from exc
    scheme = "tls" if tls else "nats"
    return AccountConnection(account, tuple(f"{scheme}://{account}:{secret}@{node}" for node in nodes), tls)


def _context(files: dict[str, Any]) -> ssl.SSLContext:
    """From PEM texts; Python's ``ssl`` takes a certificate and its key from files alone."""
    with tempfile.TemporaryDirectory(prefix="sla-account-") as directory:
        paths = []
        for name in (membership.AUTHORITY, membership.CERTIFICATE):
            paths.append(Path(directory) / name)
            fd = os.open(paths[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as stream:
                stream.write(str(files[name]))
        return contexts.node(*paths)
