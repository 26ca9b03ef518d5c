"""The table ``[notify]``: directories of what documents of recipients name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from pmdaemon.runtime.config import StrictModel
from sla_server.events import catalogue


class NotifyConfig(StrictModel):
    """Documents name files, never paths: these are the directories they are in."""

    secrets_dir: Path = Path("secrets")
    """Keys, passwords, tokens and secret addresses of recipients; a relative path is one within data_dir.
    Each file belongs to the server's user or root and is closed to others (chmod 600)."""
    commands_dir: Path = Path("commands")
    """Programs that recipients of kind command may run; a relative path is one within data_dir."""
    files_dir: Path = Path("notices")
    """Where recipients of kind file write; a relative path is one within data_dir."""
    external_url: str = Field(default="", max_length=500)
    """Address of the page as people reach it, for links in messages."""
    runbook_url: str = Field(default="", max_length=500, pattern=r"^(https?://[^\s#]+)?$")
    """Where links to what to do about an event lead, an address to which `#KIND` is added. Default: the page
    `/runbook` of the server, at `external_url`, at that of `[api]`, or where the page listens."""

    def runbook(self, page: str) -> str:
        """Where links lead; ``page`` is the server's own, "" for none: then it is a file of the project."""
        page = (self.external_url or page).rstrip("/")
        return self.runbook_url or (f"{page}/runbook" if page else catalogue.PAGE)


@dataclass(frozen=True, slots=True)
class NotifyDirectories:
    """The directories as paths from the root."""

    secrets: Path
    commands: Path
    files: Path

    @classmethod
    def of(cls, config: NotifyConfig, data_dir: Path) -> NotifyDirectories:
        """Relative ones are within the data directory."""
        return cls(*(data_dir / path for path in (config.secrets_dir, config.commands_dir, config.files_dir)))
