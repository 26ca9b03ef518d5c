"""Which gateways the PMDaemon dials: its configuration's list, and the database's.

The database's list reaches us as a file, ``<runtime_dir>/gateways.json``, which dbmanager replaces when the
table ``gateway_list`` changes: ``[{"name": ..., "address": ...}, ...]``. A file, because the parent of the
pairs has no mailbox and needs the newest list only, whoever of the two starts first. Entries that cannot be
dialled are named in the log and left out. When both lists have an address, the configuration's name counts.

How it goes with each of them is told in ``<runtime_dir>/metrics/dialled.json`` (``DialledFile``), which the
application server shows: ``[{"name", "address", "source": "list"|"configuration", "state":
"connected"|"dialling"|"waiting"|"not-dialled", "reason"}, ...]``, written whole when it changes and touched
each second: an old one says that the daemon is gone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.poller.config import ListedGateway, PmFile
from pmdaemon.poller.dialler import Target
from pmdaemon.runtime.files import write_whole

MAX_LISTED: Final = 10_000
log = structlog.get_logger("listed")


class GatewayList:
    """Rereads the file when it has changed. Thread: the parent's.

    Attributes:
        not_dialled: entries left out, as ``DialledFile`` tells of them.
    """

    def __init__(self, config: PmFile) -> None:
        self.not_dialled: list[dict[str, str]] = []
        self._config = config
        self._version: int | None = None

    def changed(self) -> list[Target] | None:
        """The whole list if it is another than at the last call, or at the first."""
        try:
            version = self._config.list_path.stat().st_mtime_ns
        except OSError:
            version = 0
        if version == self._version:
            return None
        self._version = version
        listed = {item["address"]: Target(item["name"], item["address"]) for item in self._stored()}
        for own in self._config.pmdaemon.gateway:
            listed[own.address] = Target(own.name, own.address, "configuration")
        return list(listed.values())

    def _stored(self) -> list[dict[str, str]]:
        self.not_dialled = []
        try:
            items = json.loads(self._config.list_path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as exc:
            log.warning("list-not-read", path=str(self._config.list_path), error=str(exc))
            return []
        kept = []
        for item in items[:MAX_LISTED] if isinstance(items, list) else []:
            try:
                entry = ListedGateway.model_validate(item)
            except ValueError as exc:
                self._leave_out(item, str(exc).splitlines()[-2].strip()[:300])
                continue
            if self._config.pmdaemon.may_dial(entry.address):
                kept.append(entry.model_dump())
            else:
                self._leave_out(item, "another machine's address, and TLS is off: see [pmdaemon.tls]")
        return kept

    def _leave_out(self, item: Any, reason: str) -> None:
        log.warning("not-dialled", entry=str(item)[:200], reason=reason)
        if isinstance(item, dict):
            name, address = (str(item.get(key, ""))[:200] for key in ("name", "address"))
            left_out = {"name": name, "address": address, "source": "list"}
            self.not_dialled.append({**left_out, "state": "not-dialled", "reason": reason})


class DialledFile:
    """See the module. Thread: the parent's. State: what was written last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = ""

    def write(self, rows: list[dict[str, str]]) -> None:
        """Say how it goes.

        Raises:
            OSError: no room, or no directory.
        """
        text = json.dumps(rows)
        if text == self._written and self._path.exists():
            os.utime(self._path)
            return
        write_whole(self._path, text)
        self._written = text
