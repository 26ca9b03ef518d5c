"""``make upgrade-cluster``: two servers and a third node go from the former release to this one, under load.

The former release is a commit, in a git worktree of its own for as long as this takes; the suite of tests has
no history of the repository, so this is no test. Gateways have its agents throughout. Before it begins, a
promise is being violated all the time, a volume is throttled by hand, and one agreement is applied.

    1  all of the former release, under load
    2  the server that stands by is stopped, upgraded, started: it stands by over the former schema
    3  the server that acts is stopped in order: the upgraded one takes over, and migrates the database
    4  the first one is started again as it was, by mistake: it stands by over the newer schema
    5  it is stopped, upgraded, started; then the third node; then the throttle is released

Proved are: each cut is stored once, sums agree, SQL has each I/O that a client counted (``chaos_proof``); the
one episode goes on over all of it, and each slice since it began was judged bad, none is missing; the
throttle is one all the time and holds, and nothing is held back once it was released; both agreements are in
force; every page that is read at a server that stands by answers. Exit status 1 if not.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import structlog
from sqlalchemy import create_engine, text

from benchmarks.chaos_proof import Proof
from benchmarks.cluster_proof import SETTLE_S, prove_site
from benchmarks.cluster_servers import Site
from sla_server.db.migrate import known_revisions
from tests.support.servers import NODES, SERVERS
from tests.support.stage import StageError, scratch

FORMER: Final = "acdac5ae"
SLICE_S: Final = 10
CAP_IOPS: Final = 40
"""Below what its clients ask for (``chaos_clients``), so that it holds something back."""
MOST_RATIO: Final = 1.25
"""What a cap may let pass in a slice beyond its rate, as after a pause; clients ask for 1.5 times as much."""
PROMISE: Final = """\
apiVersion: storage-sla/v1
kind: SLA
metadata: {name: NAME}
spec:
  parties: {provider: storage-team, customer: acme}
  scope: {clients: ["*"], volumes: [VOLUME], io: any}
  priority: gold
  objectives:
  - name: latency
    indicator: {metric: latency, percentile: 95}
    demand_curve:
    - {up_to_iops: 100000, value_ms: MILLISECONDS}
    applicability: {min_ios_per_slice: 10}
    budgeting: {method: timeslices, slice: 10s, target: 0.95}
  window: {type: calendar, period: month, tz: UTC}
"""
BROKEN, LATER = "always-broken", "applied-between"
PAGES: Final = (
    *("volumes", "volumes/vol-a", "slas", f"slas/{BROKEN}", "gateways", "backends", "events", "inbox"),
    *("decisions", "jobs", "policies", "processes", "nodes", "audit", "pools", "silences", "recipients"),
    *("live", "health", "why/vol-b?kind=volume", f"why/{BROKEN}?kind=sla"),
)


@contextlib.contextmanager
def former_tree(commit: str) -> Iterator[Path]:
    """The files of a commit of this repository.

    Raises:
        StageError: this is no repository, or has no such commit.
    """
    root = Path(__file__).parents[1]
    folder = Path(tempfile.mkdtemp(prefix="sla-former-")) / "tree"
    add = ["git", "-C", str(root), "worktree", "add", "--detach", str(folder), commit]
    done = subprocess.run(add, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StageError(f"no files of {commit}: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(
            ["git", "-C", str(root), "worktree", "remove", "--force", str(folder)],
            capture_output=True,
            check=False,
        )
        shutil.rmtree(folder.parent, ignore_errors=True)


class Upgrade:
    """One run.

    Attributes:
        problems: what was not as it should be.
        without_s: from each stop of the acting server until cuts are in SQL under the next one's fence.
        began_us: start of the first slice that was judged bad.
        capped_us: from when on the cap holds.
    """

    def __init__(self, site: Site, tree: Path) -> None:
        self._site = site
        self._former = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        self._engine = create_engine(site.database.url)
        self.problems: list[str] = []
        self.without_s: list[float] = []
        self.began_us = self.capped_us = 0

    def close(self) -> None:
        """End its connections."""
        self._engine.dispose()

    def run(self) -> None:
        """All steps."""
        site, servers = self._site, self._site.servers
        for name in NODES:
            servers.stages[name].environment.update(self._former)
        for agent in site.agents:
            agent.environment.update(self._former)
        site.start()
        acting = site.servers.acting()
        assert acting is not None  # it has stored cuts
        first, other = acting, next(name for name in SERVERS if name != acting)
        self._check_is_former(first)
        self._prepare(first)
        self._say(f"server {first} of the former release acts, {other} stands by")

        servers.stop(other)
        self._upgrade(other)
        self._wait_stands_by(other)
        self._check_pages(other, "the former schema")
        self._apply(first, LATER, "vol-a", "10000")
        self._say(f"server {other} is upgraded, and stands by over the former schema")

        self._hand_over(first, other)
        self._wait_revision()
        servers.start(first)
        self._wait_stands_by(first)
        self._check_is_former(first)
        self._check_pages(first, "the newer schema")
        self._say(f"server {first} of the former release stands by over the newer schema")

        servers.stop(first)
        self._upgrade(first)
        self._wait_stands_by(first)
        self._check_pages(first, "its own schema")
        servers.stop("n3")
        self._upgrade("n3")
        site.wait(site.is_settled, "two servers and three nodes in order", SETTLE_S)
        self._say("all are upgraded")

        self._check_cap(is_released=False)
        held = self._ios_by_slot()
        if not held or max(held) > MOST_RATIO * CAP_IOPS * SLICE_S:
            self.problems.append(f"I/Os in {SLICE_S} s while {CAP_IOPS} IOPS were allowed: {held}")
        servers.stages[other].sla("throttle", "release", "vol-b")
        site.wait(
            lambda: max(self._ios_by_slot(), default=0) > MOST_RATIO * CAP_IOPS * SLICE_S,
            "more I/Os than the cap has allowed",
            SETTLE_S,
        )
        self._check_cap(is_released=True)

    def _say(self, what: str) -> None:
        click.echo(f"  {what}")

    def _upgrade(self, name: str) -> None:
        environment = self._site.servers.stages[name].environment
        for key in self._former:
            del environment[key]
        self._site.servers.start(name)

    def _check_is_former(self, name: str) -> None:
        rows = self._site.servers.stages[name].get("nodes")["items"]
        if any("release" in row for row in rows):
            raise StageError(f"server {name} does not run the former release")

    def _prepare(self, acting: str) -> None:
        stage = self._site.servers.stages[acting]
        stage.sla("mode", "enforce")
        self._apply(acting, BROKEN, "vol-a", "0.002")
        cap = ("--iops", str(CAP_IOPS), "--for", "24h", "--reason", "before the upgrade")
        stage.sla("throttle", "set", "vol-b", *cap)
        self._site.wait(self._episodes, "the episode of the promise that is broken", SETTLE_S)
        seen = "SELECT confirmed_us FROM throttles WHERE source = 'manual' AND confirmed_us IS NOT NULL"
        [(confirmed_us,)] = self._site.wait(lambda: self._rows(seen), "the cap confirmed")
        self.capped_us = int(confirmed_us) + SLICE_S * 1_000_000
        first_bad = f"SELECT start_us FROM slices WHERE name = '{BROKEN}' AND state = 'bad' ORDER BY start_us"  # noqa: S608
        rows = self._site.wait(lambda: self._rows(first_bad), "a slice that is judged bad", SETTLE_S)
        self.began_us = int(rows[0][0])

    def _apply(self, server: str, name: str, volume: str, milliseconds: str) -> None:
        path = self._site.folder / f"{name}.yaml"
        made = PROMISE.replace("NAME", name).replace("VOLUME", volume)
        path.write_text(made.replace("MILLISECONDS", milliseconds))
        self._site.servers.stages[server].sla("apply", "-f", str(path))

    def _hand_over(self, first: str, other: str) -> None:
        began_s = time.monotonic()
        self._site.servers.stop(first)
        fence = self._site.wait(lambda: self._site.held_fence(other), f"{other} to have the lease")
        self._site.wait(lambda: self._site.is_stored_under(fence), f"cuts under the fence of {other}")
        self.without_s.append(time.monotonic() - began_s)
        self._say(f"server {other} of this release acts")

    def _wait_stands_by(self, name: str) -> None:
        """One of the former release need not say so: then the acting one has to see its node."""
        site = self._site
        site.wait(lambda: site.is_alive(name), f"the page of {name}")
        other = next(each for each in SERVERS if each != name)

        def is_seen() -> bool:
            rows = site.servers.stages[other].get("nodes")["items"]
            states = {row["name"]: row["state"] for row in rows}
            return states[other] == "acts" and states[name] in ("stands-by", "runs")

        site.wait(is_seen, f"{name} to stand by")

    def _wait_revision(self) -> None:
        wanted = known_revisions()[-1]
        self._site.wait(
            lambda: self._rows("SELECT version_num FROM alembic_version") == [(wanted,)], "the newer schema"
        )

    def _check_pages(self, name: str, schema: str) -> None:
        client = self._site.servers.stages[name].client
        for page in PAGES:
            answer = client.get(f"/api/v1/{page}", timeout=30.0)
            is_fine = answer.status_code < 500 or page == "health"
            if not is_fine:
                self.problems.append(
                    f"{page} at {name} over {schema}: {answer.status_code} {answer.text[:200]}"
                )

    def _rows(self, statement: str) -> list[tuple[object, ...]]:
        with contextlib.suppress(Exception), self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]
        return []

    def _episodes(self) -> list[tuple[object, ...]]:
        return self._rows(f"SELECT episode_id, closed_us FROM episodes WHERE name = '{BROKEN}'")  # noqa: S608

    def _ios_by_slot(self) -> list[int]:
        """Of the volume that is throttled, in each rollup of ten seconds since the cap was confirmed."""
        rows = self._rows(
            "SELECT sum(rollups.reads + rollups.writes) FROM rollups JOIN streams USING (stream_id) "  # noqa: S608
            f"WHERE volume = 'vol-b' AND slot_us >= {self.capped_us} GROUP BY slot_us ORDER BY slot_us"
        )
        return [int(str(row[0])) for row in rows]

    def _check_cap(self, *, is_released: bool) -> None:
        rows = self._rows("SELECT volume, state, released_us FROM throttles WHERE source = 'manual'")
        if len(rows) != 1 or rows[0][0] != "vol-b" or (rows[0][2] is not None) != is_released:
            self.problems.append(f"throttles, {'after' if is_released else 'before'} the release: {rows}")

    def check_promises(self) -> tuple[int, int]:
        """After it: slices judged bad since it began, and episodes."""
        rows = self._rows(
            "SELECT DISTINCT ON (start_us) start_us, state FROM slices "  # noqa: S608 - our names
            f"WHERE name = '{BROKEN}' AND start_us >= {self.began_us} ORDER BY start_us, revision DESC"
        )
        states = {int(str(start_us)): str(state) for start_us, state in rows}
        step_us = SLICE_S * 1_000_000
        for start_us in range(self.began_us, max(states, default=0), step_us):
            if states.get(start_us) != "bad":
                self.problems.append(f"the slice from {start_us} on is {states.get(start_us, 'missing')}")
        episodes = self._episodes()
        if [closed_us for _, closed_us in episodes] != [None]:
            self.problems.append(f"episodes of {BROKEN}: {episodes}")
        names = {str(row[0]) for row in self._rows("SELECT name FROM agreements WHERE ended_us IS NULL")}
        if not {BROKEN, LATER} <= names:
            self.problems.append(f"agreements in force: {sorted(names)}")
        return sum(state == "bad" for state in states.values()), len(episodes)


def run(folder: Path, commit: str) -> tuple[Proof, Upgrade, tuple[int, int]]:
    """One upgrade in ``folder``."""
    with former_tree(commit) as tree, contextlib.ExitStack() as ends:
        site = Site(folder, ends)
        upgrade = Upgrade(site, tree)
        ends.callback(upgrade.close)
        try:
            upgrade.run()
        finally:
            site.clients.finish()
        promises: list[tuple[int, int]] = []
        proof = prove_site(site, lambda: promises.append(upgrade.check_promises()))
        proof.problems += upgrade.problems
        return proof, upgrade, promises[0]


@click.command()
@click.option("--from", "commit", default=FORMER, show_default=True, help="Commit of the former release.")
@click.option("--keep", is_flag=True, help="Keep the folder with data and logs.")
def main(commit: str, keep: bool) -> None:
    """Upgrade two servers and a node one after the other, and prove that nothing was lost or doubled."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began_s = time.monotonic()
    with scratch("sla-upgrade-", keep) as base:
        proof, upgrade, (bad, episodes) = run(base / "run", commit)
    gaps = ", ".join(f"{gap_s:.1f} s" for gap_s in upgrade.without_s)
    click.echo(f"from {commit}, {time.monotonic() - began_s:.0f} s; hand-over to cuts in SQL again: {gaps}")
    click.echo(
        f"I/Os in SQL: {proof.volumes}; slices of the broken promise judged bad: {bad}; episodes: {episodes}"
    )
    proof.report()


if __name__ == "__main__":
    main()
