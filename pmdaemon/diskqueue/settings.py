"""What can be set about a disk queue."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from pmdaemon.runtime.config import StrictModel


class QueueSettings(StrictModel):
    """One queue. An existing queue gets the configured sizes when it is opened, see ``resize``."""

    data_path: Path
    """Data file; a partition of its own is advised."""
    more_paths: tuple[Path, ...] = ()
    """Further data files, perhaps on other disks; the ring is spread evenly over all, in this order. Fixed
    when the queue is made."""
    index_path: Path | None = None
    """Index file, perhaps on another disk; without it, beside the data file as NAME.index."""
    data_bytes: int = Field(default=64 << 20, ge=4096, le=1 << 40, multiple_of=256)
    """Size of the ring for records. Smaller than before only once the records fit."""
    entries: int = Field(default=65_536, ge=4, le=1 << 24)
    """Records held at once; 128 bytes each in the index file."""
    reserve_bytes: int = Field(default=8192, ge=0)
    """Room that only requests marked ``reserved`` may use: what must be written to drain a full queue."""
    reserve_entries: int = Field(default=16, ge=0)
    """Entries kept likewise."""
    batch_bytes: int = Field(default=4 << 20, ge=256)
    """Most bytes a sync covers; a request that does not fit waits for the next."""
    batch_requests: int = Field(default=4096, ge=1)
    """Most requests a sync covers."""
    gather_s: float = Field(default=0.0, ge=0, le=1)
    """Longest time to gather a batch. 0: what arrived during the previous sync, which measured best."""
    pause_s: float = Field(default=0.0005, ge=0, le=1)
    """While gathering, the longest pause without a new request."""
    gap_bytes: int = Field(default=1 << 20, ge=0)
    """Largest gap in the file that a batch still spans."""
    confirm_s: float = Field(default=60.0, gt=0)
    """A waiter without confirmation for so long takes the disk, or the thread that syncs, for dead."""
    index_sync_s: float = Field(default=10.0, gt=0)
    """Period of the index sync: what a crash may bring back was deleted within it."""
    retry_limit: int = Field(default=10, ge=0)
    """A record retried more often leaves the queue, for the secondary queue if there is one."""

    @model_validator(mode="after")
    def _reserves_fit(self) -> Self:
        """A queue must have room beside what it keeps back."""
        if self.reserve_entries >= self.entries:
            raise ValueError("reserve_entries must be smaller than entries")
        if self.reserve_bytes > self.data_bytes // 2:
            raise ValueError("reserve_bytes must be at most half of data_bytes")
        return self

    @property
    def resolved_index_path(self) -> Path:
        """Where the index is."""
        return self.index_path or self.data_path.with_name(self.data_path.name + ".index")
