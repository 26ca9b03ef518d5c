"""Configuration of the database manager: table ``[database]`` of the server's file.

Every process reads it, also those that never ask SQL; so SQLAlchemy is imported only where a URL is read.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from pmdaemon.runtime.config import StrictModel

DRIVERS = ("sqlite", "postgresql+psycopg")


class FilesConfig(StrictModel):
    """Where Parquet files lie, how long they are kept, and how they are merged."""

    url: str = ""
    """An fsspec URL instead of ``parquet_dir``, for example ``s3://bucket/prefix`` (its driver, here s3fs,
    must be installed). Empty: the local directory."""

    group_readable: bool = False
    """Whether members of the server's group may read the local files, too, for a policy job with a user of
    its own. The directories above them decide who gets there."""

    cuts_max_age_h: float = Field(default=48.0, gt=0)
    """Files of raw cuts are given up when their newest cut is this old."""

    cuts_max_bytes: int = Field(default=20_000_000_000, gt=0)
    """The oldest files of raw cuts are given up when all of them exceed this size."""

    rollups_after_h: float = Field(default=48.0, ge=2)
    """Rollups of an hour move from SQL to a file when the hour ended so long ago; dashboards show single
    rollups for this time, and hours beyond."""

    rollups_max_age_days: float = Field(default=35.0, gt=0)
    """Files of rollups are given up at this age; above ``policy.window_days``, or the job learns less."""

    hours_max_age_days: float = Field(default=396.0, gt=0)
    """Files of hourly rollups, which the rollup job makes of rollups that have left SQL, are given up at this
    age: 13 months."""

    days_max_age_days: float = Field(default=1096.0, gt=0)
    """Files of daily rollups are given up at this age: three years."""

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


class RetentionConfig(StrictModel):
    """How many days of what stays in SQL: table ``[database.retention]``."""

    rollups_days: float = Field(default=14.0, ge=1)
    """Rollups by slot, and their missed counts. They move to Parquet long before (48 h); what could not be
    moved by then is given up, so that the database cannot grow without end."""

    coverage_days: float = Field(default=35.0, ge=1)
    """Which gateways were observed in which slot: a month of reports and a few days."""

    hours_days: float = Field(default=396.0, ge=7)
    """Hourly rollups: 13 months, so that a month can be compared with that of a year ago."""

    slices_days: float = Field(default=396.0, ge=35)
    """Judged slices and closed episodes: what reports and error budgets are computed from."""

    events_days: float = Field(default=90.0, ge=1)
    """Events with their deliveries, and throttles that are over."""

    space_days: float = Field(default=396.0, ge=35)
    """Space of pools by day, what was done about them, and pools that are read no more."""

    decisions_days: float = Field(default=30.0, ge=1)
    """What the controller decided and why: what ``sla why`` answers from."""

    policies_days: float = Field(default=90.0, ge=1)
    """Policies with their caps and reports. The last ten stay, and those that are in force or pinned."""

    audit_days: float = Field(default=1096.0, ge=1)
    """Who changed what: three years."""


class DatabaseConfig(StrictModel):
    """Where statistics and records are kept, and how often they are written."""

    url: str = ""
    """SQLAlchemy URL: ``postgresql+psycopg://user@host/name`` or ``sqlite:////path/sla.db``; empty: SQLite in
    data_dir. It may have a password, but PGPASSFILE keeps it out of this file."""

    reader_url: str = ""
    """URL for the parts that only read (services, application server), with a role that may do no more; see
    sql/roles.sql. Empty: ``url``, in read-only sessions."""

    policy_url: str = ""
    """URL for the policy job and the report job, with a role that may read, and insert policies and reports.
    Empty: ``url``."""

    rollup_s: int = Field(default=60, ge=1, le=60)
    """Length of a rollup in seconds; divides 60. Slices are whole multiples of it. Fixed once a
    database exists."""

    flush_interval_s: float = Field(default=1.0, ge=0.05, le=60)
    """Rollups are committed this often; 1 s is what a person at the dashboard does not notice."""

    file_max_bytes: int = Field(default=64 << 20, ge=64 << 10)
    """A Parquet file of raw cuts is closed at this size."""

    file_max_s: float = Field(default=60.0, ge=1, le=3600)
    """A Parquet file of raw cuts is closed at this age."""

    queue_bytes: int = Field(default=256 << 20, ge=16 << 20, multiple_of=256)
    """Size of the ingest queue, reserved at the start; a change needs room for both sizes once, a smaller one
    holds as soon as the records fit. When it is full nothing more is taken from the mailboxes and agents keep
    their cuts. 256 MiB hold some 10 minutes of 1,000 streams at a cut a second
    while the database is away."""

    statement_timeout_s: float = Field(default=30.0, ge=1)
    """PostgreSQL gives up a statement after this time; the writer tries again."""

    lock_timeout_s: float = Field(default=10.0, ge=0.1)
    """PostgreSQL's lock_timeout and SQLite's busy_timeout."""

    pool_size: int = Field(default=4, ge=1, le=64)
    """Connections a reading process may hold."""

    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    """How long rows stay in SQL."""

    queue_dir: Path | None = None
    """Ingest queue; default: data_dir/queue. A local disk that honours fsync."""

    parquet_dir: Path | None = None
    """Parquet files (raw cuts, old rollups); default: data_dir/parquet. Object stores: ``files.url``."""

    files: FilesConfig = Field(default_factory=FilesConfig)

    @field_validator("url", "reader_url", "policy_url")
    @classmethod
    def _known_driver(cls, value: str) -> str:
        if not value:
            return value
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            url = make_url(value)
        except ArgumentError as exc:
            raise ValueError(
                "is no URL; expected sqlite:////path or postgresql+psycopg://user@host/name"
            ) from exc
        if url.drivername not in DRIVERS:
            raise ValueError(f"{url.drivername!r} is not supported; use one of {', '.join(DRIVERS)}")
        if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
            raise ValueError("an SQLite database needs a file: sqlite:////path/sla.db")
        return value

    @model_validator(mode="after")
    def _rollup_divides_minute(self) -> DatabaseConfig:
        if 60 % self.rollup_s:
            raise ValueError(f"rollup_s = {self.rollup_s} does not divide 60; use 60, 30, 20, 15, 10, 5, ...")
        return self

    def resolved_url(self, data_dir: Path) -> str:
        """The URL in force."""
        if self.url:
            return self.url
        from sqlalchemy.engine import URL

        # Through URL.create: a directory's name may hold ?, # or %.
        return URL.create("sqlite", database=str(data_dir / "sla.db")).render_as_string(hide_password=False)

    def resolved_queue_dir(self, data_dir: Path) -> Path:
        """Directory of the ingest queue."""
        return self.queue_dir or data_dir / "queue"

    def resolved_parquet_dir(self, data_dir: Path) -> Path:
        """Directory that manifest paths are relative to."""
        return self.parquet_dir or data_dir / "parquet"
