"""Membership: the secrets of a cluster in a node's directory, and how another node gets them.

    init      makes the secrets (and, with TLS, a certificate of the product's authority): the first node
    invite    writes a file for one other node: secrets, its certificate, the essential parameters
    join      takes that file, if the essential parameters of this node are the same
    leave     removes all of it

An invitation is a secret: a file of mode 0600, to be carried over a safe way and deleted, since any machine
that has it can join. Durability: what ``init`` and ``join`` write is on disk on return, the credentials last,
so that a node whose directory has them is whole.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import make_directory, sync_directory, write_whole
from sla_server.cluster import essentials
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import BadInvitation, ClusterError, ClusterRefused, NotAMember
from sla_server.cluster.server_conf import Secrets, TlsFiles
from sla_server.cluster.shared import NAMES

CREDENTIALS: Final = "credentials.json"
TLS: Final = "tls"
AUTHORITY: Final = "authority.pem"
CERTIFICATE: Final = "node.pem"
KIND: Final = "sla-cluster-invitation"
SECRET_BYTES: Final = 24
MOST_INVITATION: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes this machine a member.

    Attributes:
        cluster: its name.
        tls: files of this node; None without TLS.
    """

    cluster: str
    secrets: Secrets
    tls: TlsFiles | None

    @property
    def identity(self) -> str:
        """What tells this cluster from others, of the same name too; it gives no secret away."""
        names = ("product", "route", "system")  # what a later release adds makes no other cluster of it
        made = json.dumps({name: getattr(self.secrets, name) for name in names}).encode()
        return hashlib.blake2b(made, digest_size=16, person=b"sla-cluster").hexdigest()


def load(config: ClusterConfig, directory: Path) -> Membership:
    """The membership of this node.

    Raises:
        NotAMember: there is none.
        ClusterRefused: it is of another cluster, damaged, or without the certificate that TLS needs.
    """
    path = directory / CREDENTIALS
    try:
        found = json.loads(path.read_bytes())
        cluster, made = str(found["cluster"]), Secrets(**found["secrets"])
    except FileNotFoundError as exc:
        raise NotAMember(directory) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ClusterRefused(f"{path} is damaged ({exc}). Remove it, then join again") from exc
    if cluster != config.name:
        raise ClusterRefused(
            f"{directory} belongs to the cluster {cluster!r}, and [cluster] name is {config.name!r}. Correct "
            "the name, or 'sla cluster leave' first"
        )
    if not config.tls.enabled:
        return Membership(cluster, made, None)
    files = tls_files(directory)
    if not (files.authority.exists() and files.certificate.exists()):
        raise ClusterRefused(
            f"{files.authority.parent} has no certificate, and [cluster.tls] is enabled. Run 'sla cluster "
            "invite' again where the authority is, and 'sla cluster join --again' with its file here"
        )
    return Membership(cluster, made, files)


def tls_files(directory: Path) -> TlsFiles:
    """Where the certificates of a node are."""
    own = directory / TLS / CERTIFICATE
    return TlsFiles(directory / TLS / AUTHORITY, own, own)


def init(config: ClusterConfig, directory: Path, authority: Authority) -> None:
    """Make the secrets of a new cluster, and this node its first member.

    Raises:
        ClusterError: there are some.
        PkiError: TLS is enabled, and there is no authority.
        OSError: they cannot be written.
    """
    _check_new(directory)
    made = Secrets(*(secrets.token_hex(SECRET_BYTES) for _ in range(3)))
    _write(directory, config.name, made, _certificates(config, config.node, _hosts(config), authority))


def invitation(config: ClusterConfig, directory: Path, authority: Authority, node: str) -> str:
    """The text of the file for another node, which must be one of ``peers``, or of this one.

    This one takes it with ``again``: how else would the machine that has the authority renew its certificate.

    Raises:
        ClusterRefused: it is not listed.
        NotAMember: this node is no member itself.
        PkiError: TLS is enabled, and there is no authority.
    """
    member = load(config, directory)
    peer = next((peer for peer in config.peers if peer.name == node), None)
    if node == config.node:
        hosts = _hosts(config)
    elif peer is not None:
        hosts = [parse_address(address)[0] for address in (peer.listen, peer.routes)]
    else:
        known = ", ".join(sorted(peer.name for peer in config.peers)) or "none"
        raise ClusterRefused(
            f"{node} is not listed in [[cluster.peers]] (listed: {known}). Add it there with its addresses"
        )
    document = {
        "kind": KIND,
        "cluster": config.name,
        "node": node,
        "essentials": essentials.of(config),
        "secrets": asdict(member.secrets),
        "tls": _certificates(config, node, hosts, authority),
    }
    return json.dumps(document, indent=1) + "\n"


def join(config: ClusterConfig, directory: Path, path: Path, *, again: bool = False) -> None:
    """Become a member with an invitation.

    Args:
        config: of this node.
        directory: of this node.
        path: the invitation.
        again: replace the membership that is there, for a new certificate.

    Raises:
        ClusterError: this node is one, and ``again`` was not asked for.
        BadInvitation: it is none, or for another node or cluster.
        EssentialsDiffer: essential parameters here differ from those of the node that invites.
        OSError: the file cannot be read, or the directory not be written.
    """
    if not again:
        _check_new(directory)
    found = _read(path)
    if found["node"] != config.node:
        raise BadInvitation(
            path, f"is for the node {found['node']!r}, and [cluster] node is {config.node!r} here"
        )
    essentials.compare(essentials.of(config), found["essentials"], "the node that invites")
    _write(directory, config.name, Secrets(**found["secrets"]), found["tls"])


def leave(directory: Path) -> None:
    """Remove credentials, certificates, what the nodes share and what the engine stored; idempotent."""
    (directory / CREDENTIALS).unlink(missing_ok=True)
    for name in (TLS, "jetstream", "log"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in ("engine.conf", "destinations.json", *(f"{shared}.json" for shared in NAMES)):
        (directory / name).unlink(missing_ok=True)


def _check_new(directory: Path) -> None:
    path = directory / CREDENTIALS
    if path.exists():
        try:
            cluster = str(json.loads(path.read_bytes())["cluster"])
        except (ValueError, KeyError, TypeError):
            cluster = "?"
        raise ClusterError(
            f"{directory} belongs to the cluster {cluster!r} already. 'sla cluster leave' first if it should "
            "become a member of another one"
        )


def _hosts(config: ClusterConfig) -> list[str]:
    return [parse_address(address)[0] for address in (config.listen, config.routes)]


def _certificates(config: ClusterConfig, node: str, hosts: list[str], authority: Authority) -> dict[str, str]:
    if not config.tls.enabled:
        return {}
    from pmdaemon.pki.certificates import pem_of_der

    return {
        AUTHORITY: pem_of_der(authority.certificate_der()).decode(),
        CERTIFICATE: authority.node_credential(
            node, list(dict.fromkeys(hosts)), config.tls.lifetime_s
        ).decode(),
    }


def _write(directory: Path, cluster: str, made: Secrets, certificates: Mapping[str, str]) -> None:
    make_directory(directory, 0o700)
    if certificates:
        make_directory(directory / TLS, 0o700)
        for name, content in certificates.items():
            write_whole(directory / TLS / name, content, synced=True)
    document = {"cluster": cluster, "secrets": asdict(made)}
    write_whole(directory / CREDENTIALS, json.dumps(document, indent=1) + "\n", synced=True)
    sync_directory(directory)


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        data = stream.read(MOST_INVITATION + 1)
    try:
        found = json.loads(data)
        if len(data) > MOST_INVITATION or found["kind"] != KIND:
            raise ValueError
        Secrets(**found["secrets"])
        for key, kind in (("cluster", str), ("node", str), ("essentials", dict), ("tls", dict)):
            if not isinstance(found[key], kind):
                raise TypeError(key)
        if any(name not in (AUTHORITY, CERTIFICATE) for name in found["tls"]):
            raise KeyError("tls")
    except (ValueError, KeyError, TypeError) as exc:
        raise BadInvitation(
            path, "is no invitation; 'sla cluster invite NODE FILE' makes one on a member"
        ) from exc
    assert isinstance(found, dict)
    return found
