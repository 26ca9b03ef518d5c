"""The server's configuration: one TOML file with a table for each part.

``ServerConfig`` gathers the models that the parts define. Children get the two directories through the
environment (``SLA__DATA_DIR``, ``SLA__RUNTIME_DIR``), so that every process agrees on them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pmdaemon.mailbox import default_runtime_dir
from pmdaemon.poller.config import PmConfig
from pmdaemon.runtime import config as files
from pmdaemon.runtime.config import StrictModel
from pmdaemon.space.config import SpaceConfig
from sla_server.agreements.fields import TimeZone
from sla_server.api.config import ApiConfig
from sla_server.cluster.config import ClusterConfig
from sla_server.db.config import DatabaseConfig
from sla_server.events.config import EventsConfig
from sla_server.events.recipients.config import NotifyConfig
from sla_server.ownership import FIRST_SIGHT_VOLUMES, Ownership
from sla_server.schedule import JobSchedule
from sla_server.services.config import ServicesConfig
from sla_server.storage_resources.config import StorageConfig

SingleJob = Literal["cost-model", "capacity", "demand", "attribution", "space", "report-inputs"]


def _schedule(text: str) -> str:
    JobSchedule.parse(text)
    return text


class PolicyJobConfig(StrictModel):
    """The scheduled policy job."""

    master: str = "local[*]"
    """Spark master: local[*], spark://host:7077, yarn, k8s://..., or a Spark Connect address sc://host:port,
    for which `pyspark[connect]` must be installed."""
    window_days: int = Field(default=28, ge=1, le=400)
    """The job reads the rollups of this many days."""
    half_life_days: float = Field(default=14.0, gt=0, le=10_000)
    """Of demand: what was seen so long ago counts half."""
    time_zone: TimeZone = "UTC"
    """Hours of the week are local to a backend: in the time zone of the period of its agreement with the
    highest priority. This is the zone of backends without such an agreement."""
    calendar: str = ""
    """A `Calendar` document in force (`sla apply`): its holidays count as Sundays. Empty: there are none."""
    driver_memory: str = "2g"
    """Spark driver memory."""
    cut_rows: int = Field(default=4_000_000, ge=0, le=1_000_000_000)
    """Of the raw cuts of the last days (`[database.files] cuts_max_age_h`), which show bursts that minutes of
    rollups blur, the job reads at most so many rows. 0: none."""
    spark: dict[str, str] = Field(default_factory=dict)
    """Further settings of Spark, for example `"spark.executor.memory" = "4g"`, or `"spark.jars"` with the
    connector for an object store. A Spark Connect server has settings of its own."""
    schedule: Annotated[str, AfterValidator(_schedule)] = ""
    """When the server starts the job: `hourly`, `daily`, a time of day in UTC (`02:30`), or `every 6h`.
    Empty: never; the systemd timer may start it."""
    rollup_schedule: Annotated[str, AfterValidator(_schedule)] = ""
    """The same for the rollup job, which makes hourly and daily rollups of what has left SQL, on the same
    Spark. Best some time before the policy job, which reads them."""
    back_test_schedule: Annotated[str, AfterValidator(_schedule)] = ""
    """The same for the back-test job, which replays the last days with the policy in force and without it."""
    job_schedules: dict[SingleJob, Annotated[str, AfterValidator(_schedule)]] = Field(default_factory=dict)
    """The same for other jobs, by name: cost-model, capacity, demand, attribution, space, report-inputs. For
    example `job_schedules = { capacity = "every 6h", space = "daily" }`."""
    results_max_age_s: int = Field(default=3600, ge=0, le=604_800)
    """What the jobs of single steps (capacity, cost-model, demand, attribution) found so long ago, from the
    same agreements, volumes and settings, the policy job takes instead of computing it again. 0: never."""
    publish: Literal["if-it-helps", "always"] = "if-it-helps"
    """Whether a policy is put in force only if the back-test shows that it avoids broken promises."""
    back_test_days: int = Field(default=7, ge=1, le=35)
    """The back-test replays what was stored of this many days."""
    back_test_ios: int = Field(default=100_000, ge=1_000, le=10_000_000)
    """I/Os of the back-test, of which it simulates each three times; 100,000 take some ten seconds."""


class ReportsConfig(StrictModel):
    """Reports that the server issues by itself."""

    schedule: Annotated[str, AfterValidator(_schedule)] = ""
    """When the server looks for reports that are due, and issues them: `daily`, a time of day in UTC
    (`02:30`), `hourly`, or `every 6h`. A report is due 48 h after its period, when late data revise nothing
    any more. Empty: never; `sla report issue` does it by hand."""
    period: Literal["own", "day", "week", "month", "quarter", "year"] = "month"
    """Of which periods: `own` is that of the agreement's window (of a rolling one the month)."""


class ServerConfig(StrictModel):
    """All tables of the file."""

    data_dir: Path = Path("sla-data")
    """Everything durable: database (SQLite), ingest queue, Parquet files, tokens."""
    runtime_dir: Path | None = None
    """Mailbox segments and doorbells, on tmpfs; default: a private directory (systemd's or in /dev/shm)."""
    volume_ownership: Ownership = "first"
    """Which gateway a volume belongs to: `first`, the first one that shows it, and others once they are
    approved (`sla volumes approve`); `approve`: each once it is approved; `open`: all that show it. The key
    comes before the first table of the file."""
    first_sight_volumes: int = Field(default=FIRST_SIGHT_VOLUMES, ge=1, le=10_000_000)
    """With `volume_ownership = "first"`: so many volumes belong to a gateway because it showed them first.
    Others wait for approval."""
    pmdaemon: PmConfig = Field(default_factory=PmConfig)
    services: ServicesConfig = Field(default_factory=ServicesConfig)
    database: DatabaseConfig = Field(default_factory=DatabaseConfig)
    events: EventsConfig = Field(default_factory=EventsConfig)
    notify: NotifyConfig = Field(default_factory=NotifyConfig)
    api: ApiConfig = Field(default_factory=ApiConfig)
    policy: PolicyJobConfig = Field(default_factory=PolicyJobConfig)
    reports: ReportsConfig = Field(default_factory=ReportsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    space: SpaceConfig = Field(default_factory=SpaceConfig)
    cluster: ClusterConfig | None = None

    @model_validator(mode="after")
    def _servers_share_what_they_take_over(self) -> ServerConfig:
        if self.cluster is None or not self.cluster.takeover.enabled:
            return self
        url, files = self.database.url, self.database.parquet_dir

        def named(value: object) -> str:
            return repr(str(value)) if value else "not set"

        if not url.startswith("postgresql"):
            raise ValueError(
                f"cluster.takeover.enabled: database.url is {named(url)}, a database of this machine "
                "alone: the server that takes over would have none of it. Set the same "
                "postgresql+psycopg:// URL on all servers"
            )
        if not self.database.files.url and (files is None or not files.is_absolute()):
            raise ValueError(
                f"cluster.takeover.enabled: database.parquet_dir is {named(files)}, "
                "and so below data_dir, which is this server's own. Set an absolute directory that all "
                "servers have (by NFS, for instance), or database.files.url"
            )
        return self

    @model_validator(mode="after")
    def _leases_outlast_polls(self) -> ServerConfig:
        interval_s, lease_s = self.pmdaemon.interval_s, self.services.control.lease_s
        if interval_s >= lease_s:
            raise ValueError(
                f"pmdaemon.interval_s = {interval_s:g} is not below services.control.lease_s = {lease_s:g}: "
                "a poll renews the lease, so every cap would end before the next one. Poll more often, or "
                "make the lease several intervals long"
            )
        return self

    @property
    def runbook_url(self) -> str:
        """Page that links of notices lead to, for people; an entry is behind ``#KIND``."""
        return self.notify.runbook(self.api.page_url)


class ResolvedConfig(ServerConfig):
    """The same with both directories absolute."""

    runtime_dir: Path

    @property
    def ca_dir(self) -> Path:
        """The directory of the certificate authority."""
        return self.pmdaemon.tls.state_dir or self.data_dir / "ca"


def resolve(config: ServerConfig) -> ResolvedConfig:
    """Make both directories absolute and give the runtime directory its default."""
    data_dir = config.data_dir.expanduser().absolute()
    runtime_dir = config.runtime_dir
    if runtime_dir is None:
        tag = hashlib.blake2b(str(data_dir).encode(), digest_size=4).hexdigest()
        runtime_dir = default_runtime_dir() / f"server-{tag}"
    control = config.services.control
    if "poll_interval_s" not in control.model_fields_set:
        # The loop counts ages in polls: one number for both parts, unless the file sets the second one.
        control.poll_interval_s = config.pmdaemon.interval_s
    values = dict(config)
    values.update(data_dir=data_dir, runtime_dir=runtime_dir.expanduser().absolute())
    return ResolvedConfig.model_construct(**values)


def load(path: Path | None) -> ResolvedConfig:
    """Read the file (or nothing) and the environment.

    Raises:
        ConfigError: names the file, the key, the value and what is expected.
    """
    return resolve(files.load(ServerConfig, path))
