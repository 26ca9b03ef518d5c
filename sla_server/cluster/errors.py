"""Errors of the cluster.

SlaError (pmdaemon.errors)
└── ClusterError            root of all below; by itself: this machine has credentials already
    ├── EngineMissing       there is no nats-server, or it cannot be run
    ├── EngineTooOld        the nats-server found cannot keep what the configuration promises
    ├── NotAMember          this machine has no credentials of the cluster: init or join first
    ├── BadInvitation       the file given to ``sla cluster join`` is none, or of another cluster
    ├── EssentialsDiffer    essential parameters differ from those of a running node (C14)
    ├── StoredAlone         what a node has stored by itself would be removed among others
    ├── BadAccount          an account cannot have this name or these roles
    ├── BadParameter        an acquirable parameter cannot have the value that it was given
    ├── DocumentDamaged     a file with parameters or accounts of the cluster cannot be read
    ├── ClusterUnreachable  no node answers
    └── ClusterRefused      a node answers and does not do it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pmdaemon.errors import SlaError

UNREADABLE: Final = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What reading a document of another program may end in: Python takes infinities and deep lists for JSON."""


class ClusterError(SlaError):
    """Root of the errors of this package."""


class EngineMissing(ClusterError):
    """There is no nats-server, or the one there cannot be run."""

    exit_status = 69  # EX_UNAVAILABLE

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"{problem}. Install nats-server 2.12 or newer and put it on PATH, or name it in [cluster] "
            "engine; docs/operations/cluster.md says where to get it"
        )


class EngineTooOld(ClusterError):
    """The engine lacks something that the configuration asks for."""

    exit_status = 78  # EX_CONFIG

    def __init__(self, path: Path, version: str, lacks: str, fix: str) -> None:
        self.path = path
        self.version = version
        super().__init__(f"{path} is nats-server {version}, which {lacks}. {fix}")


class NotAMember(ClusterError):
    """This machine has no credentials of a cluster."""

    exit_status = 78

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"{directory} has no credentials of a cluster. Run 'sla cluster init' for the first node; on "
            "others 'sla cluster join FILE' with a file that 'sla cluster invite' has made"
        )


class BadInvitation(ClusterError):
    """The file is no invitation, or not for this node."""

    exit_status = 65  # EX_DATAERR

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class EssentialsDiffer(ClusterError):
    """Essential parameters differ from those of another node.

    Attributes:
        differences: parameter -> (here, there).
    """

    exit_status = 78

    def __init__(self, other: str, differences: Mapping[str, tuple[str, str]]) -> None:
        self.other = other
        self.differences = dict(differences)
        named = ", ".join(
            f"{key} is {here or 'not set'} here and {there or 'not set'} there"
            for key, (here, there) in sorted(differences.items())
        )
        super().__init__(
            f"essential parameters differ from those of {other}: {named}. Give this node the same values in "
            "[cluster], or stop all nodes and change them everywhere"
        )


class StoredAlone(ClusterError):
    """A node has stored streams without others, and is to be one of several now.

    Attributes:
        streams: their names.
    """

    exit_status = 78

    def __init__(self, node: str, store: Path, streams: Sequence[str]) -> None:
        self.streams = tuple(streams)
        super().__init__(
            f"node {node} has stored by itself, without [[cluster.peers]]: {', '.join(streams)}. An engine "
            "that becomes one of several removes what it has stored so, after half a minute. To have it "
            f"consumed first, start the node without peers. Then, or to do without it, move {store} away and "
            "start again"
        )


class BadAccount(ClusterError):
    """An account cannot be so."""

    exit_status = 2

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        super().__init__(f"account {name!r}: {problem}")


class BadParameter(ClusterError):
    """An acquirable parameter cannot be so."""

    exit_status = 2

    def __init__(self, name: str, value: str, problem: str) -> None:
        self.name = name
        super().__init__(f"parameter {name!r} cannot be {value!r}: {problem}")


class DocumentDamaged(ClusterError):
    """A file that the nodes share is not what was written."""

    exit_status = 78

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} is damaged ({problem}). Remove it: this node takes its content from the others when it "
            "starts"
        )


class ClusterUnreachable(ClusterError):
    """No node answers."""

    exit_status = 69
    retryable = True

    def __init__(self, tried: str, problem: str) -> None:
        super().__init__(
            f"no node of the cluster answers at {tried}: {problem}. Start one with 'sla-server start', or "
            "check [cluster] listen and peers"
        )


class ClusterRefused(ClusterError):
    """A node answers, and refuses or cannot do it now."""

    exit_status = 75  # EX_TEMPFAIL
    retryable = True
