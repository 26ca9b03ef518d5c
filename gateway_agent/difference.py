"""What differs between two configurations of the agent, and what each of its processes does about it. Pure.

    AGENT_KEYS    the parent holds them for its life (locks, identity): they need a restart of the agent
    LINK_KEYS     the link is started again with them; application I/O does not pass through it
    plane, export, a plane is added, removed, or given its new part (``plane_part``); no client of an export
    group         that stays is touched
    others        of all planes, each takes them with its part

A plane that runs takes its part as JSON, because reading the whole TOML file again would keep its clients
waiting: for 512 exports it takes 30 to 50 ms of a processor, the part 4 to 8. A part is known by its
``digest``, which the plane reports back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway_agent.config import AgentConfig, ExportConfig

AGENT_KEYS: Final = ("name", "state_dir", "runtime_dir")
LINK_KEYS: Final = (
    *("server", "tls", "server_users", "listen"),
    *("spool_bytes", "reconnect", "host", "cgroup", "qemu", "space"),
)
_OF_PLANES: Final = ("plane", "export", "group")
MOST_NAMES: Final = 5
"""Exports named in one line; the others are counted."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names that were added, removed, and of what has changed, in the order of their files."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def lines(self, kind: str) -> list[str]:
        """For people, a line for each of the three."""
        named = (("added", self.added), ("removed", self.removed), ("changed", self.changed))
        return [f"{kind} {what}: {_few(names)}" for what, names in named if names]


@dataclass(frozen=True, slots=True)
class Difference:
    """See the module docstring.

    Attributes:
        agent: keys that need a restart of the agent.
        link: keys that the link must be started with.
        common: keys that all planes take.
        planes: by name; ``changed`` are those that stay and whose part differs.
        exports: by volume; one that moves to another plane has changed.
        groups: of volumes, by name.
    """

    agent: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    planes: Names = Names()
    exports: Names = Names()
    groups: Names = Names()

    def __bool__(self) -> bool:
        of_planes = self.planes or self.exports or self.groups
        return bool(self.agent or self.link or self.common or of_planes)

    def lines(self) -> list[str]:
        """What takes effect, for people; a line for each kind of change."""
        entries = Names(self.planes.added, self.planes.removed)  # the others are named by what has changed
        found = self.exports.lines("exports") + self.groups.lines("groups") + entries.lines("planes")
        if keys := (*self.link, *self.common):
            found.append(f"settings changed: {', '.join(keys)}")
        if self.planes.changed and not found:
            found.append(f"planes changed: {_few(self.planes.changed)}")
        return found


def _few(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def compare(old: AgentConfig, new: AgentConfig) -> Difference:
    """What differs between what is in force and what is wanted."""
    common = [key for key in AgentConfig.model_fields if key not in (*AGENT_KEYS, *LINK_KEYS, *_OF_PLANES)]

    def differing(keys: tuple[str, ...] | list[str]) -> tuple[str, ...]:
        return tuple(key for key in keys if getattr(old, key) != getattr(new, key))

    def parts(config: AgentConfig) -> dict[str, object]:
        return {
            plane.name: (plane, exports_of(config, plane.name), config.groups_of(plane.name))
            for plane in config.plane
        }

    def exports(config: AgentConfig) -> dict[str, object]:
        return {
            export.volume: (plane.name, export)
            for plane in config.plane
            for export in exports_of(config, plane.name)
        }

    changed = differing(common)
    planes = _names(parts(old), parts(new))
    if changed:
        planes = Names(planes.added, planes.removed, tuple(name for name in parts(new) if name in parts(old)))
    return Difference(
        differing(AGENT_KEYS),
        differing(LINK_KEYS),
        changed,
        planes,
        _names(exports(old), exports(new)),
        _names({each.name: each for each in old.group}, {each.name: each for each in new.group}),
    )


def _alone(export: ExportConfig) -> ExportConfig:
    """Without ``plane``, which may be left out: what matters is the plane that it means."""
    return export.model_copy(update={"plane": ""})


def _names(old: Mapping[str, object], new: Mapping[str, object]) -> Names:
    return Names(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name, value in new.items() if name in old and old[name] != value),
    )


def in_force(old: AgentConfig, new: AgentConfig) -> AgentConfig:
    """``new`` without what needs a restart: what the processes of this agent run with.

    Raises:
        ValidationError: the two do not go together, as with a plane's name too long for the old runtime_dir.
    """
    kept = {key: getattr(old, key) for key in AGENT_KEYS}
    if all(getattr(new, key) == value for key, value in kept.items()):
        return new
    return AgentConfig.model_validate({**new.model_dump(mode="json"), **kept})


# -- the part of one plane


def exports_of(config: AgentConfig, plane: str) -> list[ExportConfig]:
    """The exports of one plane."""
    return [_alone(export) for export in config.plane_config(plane).exports]


def plane_part(config: AgentConfig, plane: str) -> dict[str, Any]:
    """What one plane must know, as JSON: an agent's configuration with that plane alone.

    Without exports for a plane that is removed: it lets its clients go, and ends.
    """
    whole = config.model_dump(mode="json", exclude=set(LINK_KEYS) | set(_OF_PLANES))
    entries = [entry.model_dump(mode="json") for entry in config.plane if entry.name == plane]
    exports = [export.model_dump(mode="json") for export in exports_of(config, plane)] if entries else []
    groups = [group.model_dump(mode="json") for group in config.groups_of(plane)]
    return {**whole, "plane": entries, "export": exports, "group": groups}


def digest(part: Mapping[str, Any]) -> str:
    """Identity of a part: 16 hexadecimal digits."""
    text = json.dumps(part, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
