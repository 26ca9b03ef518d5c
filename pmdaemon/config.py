"""Configuration of the PMDaemon: the table ``[pmdaemon]`` of the server's file, and the two directories.

``PmConfig`` is the table; ``sla_server.config`` uses the same model. ``PmFile`` is what ``pmdaemon`` itself
reads: from the shared file it takes only the keys it knows, other parts' tables are their business; unknown
keys *inside* ``[pmdaemon]`` are errors.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pmdaemon.errors import ConfigError
from pmdaemon.runtime import config as files
from pmdaemon.runtime.config import StrictModel


class PmConfig(StrictModel):
    """The performance-monitor daemon: polling of the gateways."""

    listen: str = "127.0.0.1:7411"
    """Where agents dial in, "address:port"; port 0 takes a free one (see pmdaemon.port in the runtime
    directory). Loopback addresses only, until enrolment and TLS exist."""
    interval_s: float = Field(default=1.0, ge=0.1, le=60.0)
    """Seconds between two polls of a gateway."""
    pairs: Annotated[int, Field(ge=1, le=256)] | Literal["unified"] | None = None
    """Number of thread pairs (processes); unset: by the formula of docs/design/1-monitor-daemon.md.
    "unified": one process, in which one thread sends and reads and another only wakes it (P15)."""
    max_pairs: int = Field(default=1, ge=1, le=256)
    """Upper limit of pairs; the mailbox segment is laid out for this many."""
    thread_quantum_ms: float = Field(default=10.0, ge=0.1, le=1000.0)
    """T_thr of the formula: within this time a pair gets through all its gateways once."""
    open_files: int = Field(default=16384, ge=256, le=1 << 20)
    """Descriptors wanted (RLIMIT_NOFILE is raised to it): one a gateway and some 50 more."""

    @field_validator("listen")
    @classmethod
    def _loopback_only(cls, value: str) -> str:
        parse_listen(value)
        return value

    @property
    def fixed_pairs(self) -> int | None:
        """The number of pair processes, if it is not left to the formula."""
        return 1 if self.pairs == "unified" else self.pairs

    @property
    def interval_ns(self) -> int:
        """The poll interval in nanoseconds."""
        return round(self.interval_s * 1e9)


class PmFile(BaseModel):
    """What the daemon reads of the server's file."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    runtime_dir: Path
    """Directory of the mailbox segments and of pmdaemon.port; ``sla-server`` gives it in SLA__RUNTIME_DIR."""
    data_dir: Path = Path("sla-data")
    """The server's durable data; the daemon itself keeps nothing there."""
    pmdaemon: PmConfig = Field(default_factory=PmConfig)

    @property
    def segment_path(self) -> Path:
        """The main mailbox segment."""
        return self.runtime_dir / "main.mbx"

    @property
    def metrics_path(self) -> Path:
        """The daemon's figures about itself, written each second."""
        return self.runtime_dir / "metrics" / "pmdaemon.prom"

    @property
    def port_path(self) -> Path:
        """The file that says on which port the daemon listens."""
        return self.runtime_dir / "pmdaemon.port"


def load(path: Path | None) -> PmFile:
    """Read the file (or nothing) and the environment.

    Raises:
        ConfigError: names the file, the key, the value and what is expected.
    """
    if path is None and "SLA__RUNTIME_DIR" not in os.environ:
        raise ConfigError(
            "runtime_dir",
            "is not set",
            "Give --config FILE with runtime_dir in it, or SLA__RUNTIME_DIR; sla-server start sets it",
        )
    return files.load(PmFile, path)


def parse_listen(value: str) -> tuple[str, int]:
    """("127.0.0.1", 7411) from "127.0.0.1:7411".

    Raises:
        ValueError: not "address:port", or not a loopback address.
    """
    host, _, port_text = value.rpartition(":")
    host = host.strip("[]")
    if not host or not port_text.isdigit() or int(port_text) > 65535:
        raise ValueError('expected "address:port", for example "127.0.0.1:7411"; port 0 takes a free one')
    if host == "localhost":
        host = "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError as exc:
        raise ValueError(f'{host!r} is not an IP address; use "127.0.0.1:{port_text}"') from exc
    if not address.is_loopback:
        raise ValueError(
            f"{host} can be reached from other machines, and this release cannot tell a gateway from "
            "a stranger: enrolment of agents and TLS are missing. "
            f'Use "127.0.0.1:{port_text}" and run agents on this machine'
        )
    return host, int(port_text)
