"""The part of the configuration that one data plane runs with: read at the start, and again at each reload.

The parent writes ``runtime_dir/PLANE.config`` and sends SIGHUP. The plane reads that file between two turns
of its loop, so it validates only the exports that it does not know; the others are compared as they are.

State: the raw form of each export in force, its checked form, and the ``digest`` of the whole.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway_agent.cap_config import GroupEntry
from gateway_agent.config import AgentConfig, ExportConfig, PlaneConfig
from gateway_agent.difference import digest, plane_part
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import describe


def part_file(runtime_dir: Path, plane: str) -> Path:
    """Where the parent leaves the part of a plane."""
    return runtime_dir / f"{plane}.config"


class PlanePart:
    """See the module docstring. Thread: the plane's loop only."""

    def __init__(self, config: AgentConfig, plane: str) -> None:
        raw = plane_part(config, plane)
        self.path = part_file(config.runtime_dir, plane)
        self.digest = digest(raw)
        self.config = config.plane_config(plane)
        self._known = self._by_volume(raw["export"], self.config.exports)

    @staticmethod
    def _by_volume(
        raw: list[dict[str, Any]], exports: list[ExportConfig]
    ) -> dict[str, tuple[dict[str, Any], ExportConfig]]:
        return {export.volume: (item, export) for item, export in zip(raw, exports, strict=True)}

    def read(self) -> PlaneConfig:
        """What the file says now; in force from here on.

        Raises:
            ConfigError: it cannot be read, or is not what a parent writes. The former part stays.
        """
        try:
            raw = json.loads(self.path.read_text())
            wanted: list[dict[str, Any]] = raw["export"]
            config = self._checked(raw, wanted) if wanted else replace(self.config, exports=[], groups=())
        except OSError as exc:
            raise ConfigError(str(self.path), f"cannot be read: {exc.strerror}") from exc
        except ValidationError as exc:
            raise ConfigError(str(self.path), describe(exc)) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(str(self.path), f"is not what gateway-agent writes ({exc!r})") from exc
        self.config, self.digest = config, digest(raw)
        self._known = self._by_volume(wanted, config.exports)
        return config

    def _checked(self, raw: dict[str, Any], wanted: list[dict[str, Any]]) -> PlaneConfig:
        known = {
            item["volume"]: self._known[item["volume"]][1]
            for item in wanted
            if item["volume"] in self._known and self._known[item["volume"]][0] == item
        }
        fresh = [item for item in wanted if item["volume"] not in known]
        # A plane without an export is refused: one that is known is checked again for the plane's own sake.
        agent = AgentConfig.model_validate({**raw, "export": fresh or wanted[:1], "group": []})
        config = agent.plane_config(self.config.plane)
        known |= {export.volume: export for export in config.exports if export.volume not in known}
        groups = tuple(GroupEntry.model_validate(each) for each in raw.get("group", ()))
        return replace(config, exports=[known[item["volume"]] for item in wanted], groups=groups)
