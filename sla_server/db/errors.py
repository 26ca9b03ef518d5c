"""Errors of the database manager.

    SlaError
    └── DbError                    root
        ├── DatabaseUnavailable    cannot be reached or used just now; the writer retries, readers may too
        │   └── DatabaseDamaged    its file is damaged: trying again cannot help, a backup does
        ├── NoDatabaseYet          its file is missing: no server has been started with this configuration
        ├── DatabaseRefused        the database refuses a value; retrying the same value cannot help
        ├── FenceLost              another server writes here now; nothing was written
        ├── ServerStandsBy         a command that writes was given to a server that does not act
        ├── OtherCluster           the lease of this database is another cluster's
        ├── QueueCopied            this server's ingest queue is a copy of another server's
        ├── NotAlone               several servers use this database, and the file says that one does
        ├── SnapshotGone           rows of a snapshot cannot be read any more, or not from here
        ├── NoRightToPublish       the policy job's role lacks its rights; says which script grants them
        ├── SchemaTooNew           made by a newer release of this product; nothing was changed
        ├── BadRecord              a RECORD row that fits no table; answered to its sender, never stored
        ├── ArchiveFailed          a Parquet file could not be written; its cuts stay in the queue
        ├── FilesUnavailable       the store of Parquet files cannot be used just now
        ├── FileDamaged            a Parquet file is not what the manifest says
        ├── StorageBusy            another process is looking after the files
        ├── IngestQueuePoisoned    a write or sync failed earlier; what reached the disk is unknown
        ├── NoRoomForQueue         the disk has no room for a new queue; nothing was made
        └── OldQueueFiles          the directory holds the plain files of an earlier version

No exception of SQLAlchemy or a driver leaves ``sla_server.db``: ``engine.translated`` turns them into these.
"""

from __future__ import annotations

from pathlib import Path

from pmdaemon.errors import SlaError
from pmdaemon.runtime.config import masked


class DbError(SlaError):
    """Root, and what has no class of its own: a backup that could not be made, a second manager.

    Whatever a driver says, no secret of a URL is in the text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(masked(text))


class DatabaseUnavailable(DbError):
    """The database cannot be used just now; the same action may succeed later."""

    retryable = True
    exit_status = 75  # EX_TEMPFAIL of sysexits

    def __init__(
        self,
        where: str,
        reason: str,
        advice: str = "Check that it runs, that it accepts this user, and that [database] url names it",
    ) -> None:
        self.where = where
        self.reason = reason
        super().__init__(f"the database {where} cannot be used: {reason}. {advice}")


class NoDatabaseYet(DbError):
    """SQLite's file is missing; the server's first start makes it."""

    exit_status = 69  # EX_UNAVAILABLE

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"no server has been started here yet: there is no {path}. Run 'sla-server start', or name the "
            "server's configuration with --config (SLA_CONFIG)"
        )


class FenceLost(DbError):
    """Another server has taken over: this one may write nothing any more.

    Attributes:
        fence: of the server that writes now.
        server: its name.
    """

    exit_status = 75  # EX_TEMPFAIL of sysexits

    def __init__(self, own: int, fence: int, server: str) -> None:
        self.fence = fence
        self.server = server
        super().__init__(
            f"server {server} writes to this database since its fence {fence}, this server's is {own}: it "
            "has lost the lease, and stands by until it has it again; see 'sla get nodes'. If each of them "
            "says that it acts, they are nodes of two clusters, which must be one: 'sla cluster status'"
        )


class ServerStandsBy(DbError):
    """Of several servers this one does not act, so what writes is not begun here.

    Attributes:
        holder: the node whose server acts; "": not known, or none.
    """

    exit_status = 69  # EX_UNAVAILABLE

    def __init__(self, node: str, holder: str) -> None:
        self.holder = holder
        super().__init__(
            f"the server of node {self.holder} acts, that of node {node} stands by. Run this on "
            f"{self.holder}: only the acting server writes to the database"
            if self.holder
            else f"no server acts just now, as far as node {node} knows: none has the lease of the cluster. "
            "See 'sla cluster status', and run this again on the server that 'sla get nodes' says acts"
        )


class OtherCluster(DbError):
    """The servers of this database take over from each other in another cluster than this server's.

    Each cluster has a lease of its own: two servers would act, and neither would know of the other.

    Attributes:
        server: the node whose server acted last.
    """

    exit_status = 78  # EX_CONFIG of sysexits

    def __init__(self, node: str, server: str) -> None:
        self.server = server
        super().__init__(
            f"node {node} is of another cluster than the servers of this database (that of node {server} "  # noqa: S608
            "acted last): both would act. A cluster is made once, by 'sla cluster init' on its first node. "
            f"There run 'sla cluster invite {node}', here 'sla cluster leave' and 'sla cluster join'. If the "
            'other cluster was lost for good with all its nodes, run "DELETE FROM fences WHERE name = '
            "'cluster'\" in the database first"
        )


class QueueCopied(DbError):
    """The ingest queue has another server's id, as on a machine that was copied with its data directory.

    Cursors in the database go by that id: each of the two would take the other's for its own.

    Attributes:
        server: the node whose queue it is.
    """

    exit_status = 78  # EX_CONFIG of sysexits

    def __init__(self, node: str, server: str) -> None:
        self.server = server
        renamed = f"UPDATE fences SET server = '{node}' WHERE name = 'gateways'"  # noqa: S608
        super().__init__(
            f"the ingest queue of node {node} is a copy of that of node {server}, which acted last. A "
            "machine that was copied needs a data directory of its own: stop this server, remove the files "
            f"of its queue ('ingest' and 'ingest.index'; {server} has what is in them), and start it again. "
            f'If node {server} was renamed to {node}, run "{renamed}" in the database first'
        )


class NotAlone(DbError):
    """Servers take over from each other on this database, and this one's file does not say so.

    Attributes:
        server: the node whose server acted last.
    """

    exit_status = 78  # EX_CONFIG of sysexits

    def __init__(self, server: str) -> None:
        self.server = server
        super().__init__(
            f"servers take over from each other on this database (that of node {server} acted last), and "  # noqa: S608
            "[cluster.takeover] enabled is not true here: both would write. Set it, with the nodes of the "
            "cluster in [cluster]. If all others were stopped for good, and this server goes on alone, run "
            "\"UPDATE fences SET fence = 0 WHERE name = 'gateways'\" in the database first"
        )


class SnapshotGone(DbError):
    """Rows of a snapshot of the statistics cannot be read: take another."""

    retryable = True

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(
            f"the statistics in {what} cannot be read: {reason}. Run the job again. With SQLite, Spark must "
            "run on the machine of the database: use PostgreSQL for executors on others"
        )


class DatabaseDamaged(DatabaseUnavailable):
    """The database's own file is damaged; the queue holds what comes in until it is restored."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.args = (
            f"the database {where} is damaged: {reason}. It does not heal by itself: stop the server, move "
            "the damaged file away, and bring back the newest backup with `sla storage restore`. What comes "
            "in meanwhile waits in the ingest queue",
        )


class DatabaseRefused(DbError):
    """The database refuses a value; the same action fails again."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the database refused a value: {reason}")


class NoRightToPublish(DbError):
    """The policy job could not store what it would compute."""

    exit_status = 77  # EX_NOPERM

    def __init__(self, where: str, tables: list[str]) -> None:
        self.tables = tables
        names = " and ".join(filter(None, (", ".join(tables[:-1]), tables[-1])))
        super().__init__(
            f"the user of the database {where} may not insert into {names}. Run sql/roles.sql "
            "as a superuser in that database (again: rights on tables need the tables, which the server's "
            "first start makes), and name the role sla_policy in [database] policy_url"
        )


class SchemaTooNew(DbError):
    """The schema was made by a newer release; this one does not touch it."""

    exit_status = 78

    def __init__(self, where: str, found: str, newest_known: str) -> None:
        self.found = found
        self.newest_known = newest_known
        super().__init__(
            f"the schema of {where} is at revision {found!r}, "
            f"this release knows nothing above {newest_known!r}. "
            "Install the newer release again, or restore the backup made before the upgrade"
        )


class BadRecord(DbError):
    """A RECORD row that fits no table."""

    def __init__(self, table: str, problem: str) -> None:
        self.table = table
        self.problem = problem
        super().__init__(f"row for table {table!r}: {problem}; see docs/formats/sql.md")


class ArchiveFailed(DbError):
    """A Parquet file could not be written; nothing is lost, its cuts wait in the ingest queue."""

    retryable = True

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}. Its cuts wait in the ingest queue; free space or repair the file system"
        )


class FilesUnavailable(DbError):
    """The store of Parquet files cannot be used just now; the same action may succeed later."""

    retryable = True
    exit_status = 75

    def __init__(self, where: str, reason: str) -> None:
        self.where = where
        super().__init__(
            f"the Parquet files at {where} cannot be used: {reason}. Check [database.files] url, that fsspec "
            "and the driver for its protocol are installed, and its credentials"
        )


class FileDamaged(DbError):
    """A Parquet file is not what the manifest says; it is left where it is and not merged."""

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(
            f"{name}: {problem}. `sla storage verify` checks all files; restore this one from a backup, or "
            "leave it: rollups in SQL do not depend on it"
        )


class StorageBusy(DbError):
    """Another process is looking after the files."""

    retryable = True
    exit_status = 75

    def __init__(self, lock: Path) -> None:
        super().__init__(
            f"{lock} is held: the server or another command is looking after the files. Try again in a minute"
        )


class IngestQueuePoisoned(DbError):
    """A write or sync failed earlier; the queue takes nothing more until it was opened again."""

    retryable = True  # by a restart, which reads back what really reached the disk

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: a write or sync failed ({reason}); nothing more is accepted until the database manager "
            "was restarted and has read back what reached the disk. Check the disk and its free space"
        )


class NoRoomForQueue(DbError):
    """The queue is reserved at full size when it is made; there is no room for that."""

    exit_status = 74

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(
            f"the ingest queue {path} needs {needed_bytes} bytes, and {free_bytes} are free on its disk. "
            "Free space, name another disk with [database] queue_dir, or make [database] queue_bytes smaller"
        )


class OldQueueFiles(DbError):
    """The directory holds the plain files of an earlier version, which this one does not read."""

    exit_status = 78

    def __init__(self, directory: Path, files: int) -> None:
        super().__init__(
            f"[database] queue_dir {directory} holds {files} files *.seg of an earlier version's ingest "
            "queue. Start that version once more and stop it in order, so that it writes everything out; "
            "then move the files `*.seg` and `id` away. Or set queue_dir to another directory"
        )
