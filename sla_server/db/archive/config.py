"""Configuration of the Parquet files: table ``[database.files]`` of the server's file."""

from __future__ import annotations

from pydantic import Field, field_validator

from pmdaemon.runtime.config import StrictModel


class FilesConfig(StrictModel):
    """Where Parquet files lie, how long they are kept, and how they are merged."""

    url: str = ""
    """An fsspec URL instead of ``parquet_dir``, for example ``s3://bucket/prefix`` (its driver, here s3fs,
    must be installed). Empty: the local directory."""

    cuts_max_age_h: float = Field(default=48.0, gt=0)
    """Files of raw cuts are given up when their newest cut is this old."""

    cuts_max_bytes: int = Field(default=20_000_000_000, gt=0)
    """The oldest files of raw cuts are given up when all of them exceed this size."""

    rollups_after_h: float = Field(default=48.0, ge=2)
    """Rollups of an hour move from SQL to a file when the hour ended so long ago; dashboards show single
    rollups for this time, and hours beyond."""

    rollups_max_age_days: float = Field(default=35.0, gt=0)
    """Files of rollups are given up at this age; above ``policy.window_days``, or the job learns less."""

    merge_below_bytes: int = Field(default=32 << 20, ge=0)
    """Only files below this size are merged with others; 0: none."""

    merge_to_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Merged files have about this size at most."""

    grace_s: float = Field(default=7200.0, ge=0)
    """A file that was merged or given up is deleted so much later: longer than a policy job reads, and than
    the copying of a backup takes."""

    interval_s: float = Field(default=60.0, ge=0.1)
    """The database manager looks after its files this often."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        if value and "://" not in value:
            raise ValueError(f"{value!r} is no fsspec URL; for a local directory set [database] parquet_dir")
        return value
