"""Which gateways the PMDaemon dials: its configuration's list, and the database's.

The database's list reaches us as a file, ``<runtime_dir>/gateways.json``, which dbmanager replaces when the
table ``gateway_list`` changes: ``[{"name": ..., "address": ...}, ...]``. A file, because the parent of the
pairs has no mailbox and needs the newest list only, whoever of the two starts first. Entries that cannot be
dialled are named in the log and left out. When both lists have an address, the configuration's name counts.
"""

from __future__ import annotations

import json

import structlog

from pmdaemon.config import ListedGateway, PmFile
from pmdaemon.net.dialler import Target

MAX_LISTED = 10_000
log = structlog.get_logger("listed")


class GatewayList:
    """Rereads the file when it has changed. Thread: the parent's."""

    def __init__(self, config: PmFile) -> None:
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
            listed[own.address] = Target(own.name, own.address)
        return list(listed.values())

    def _stored(self) -> list[dict[str, str]]:
        try:
            items = json.loads(self._config.list_path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as exc:
            log.warning("list-not-read", path=str(self._config.list_path), error=str(exc))
            return []
        kept = []
        for item in items[:MAX_LISTED] if isinstance(items, list) else []:
            try:
                entry = ListedGateway.model_validate(item)
            except ValueError as exc:
                log.warning(
                    "not-dialled", entry=str(item)[:200], reason=str(exc).splitlines()[-2].strip()[:300]
                )
                continue
            if self._config.pmdaemon.may_dial(entry.address):
                kept.append(entry.model_dump())
            else:
                log.warning("not-dialled", entry=entry.address, reason="another machine's, and TLS is off")
        return kept
