"""fio through the whole product: data verified, and every count of I/Os the same wherever it is shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stage import Agent, Stage


@pytest.fixture(scope="module")
def fio_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One agent: volume ``remote`` before nbdkit, volume ``local`` on a file."""
    with Stage(tmp_path_factory.mktemp("fio"), interval_s=0.5) as stage:
        image = stage.folder / "local.img"
        image.write_bytes(bytes(32 << 20))
        socket = stage.sockets / "nbdkit.sock"
        nbdkit = subprocess.Popen(["nbdkit", "--foreground", "--unix", str(socket), "memory", "32M"])
        try:
            stage.wait(socket.exists, "nbdkit")
            stage.start_server()
            volumes = {"remote": f"nbd+unix:///?socket={socket}", "local": str(image)}
            stage.start_agent(Agent("gateway-fio", volumes))
            stage.wait(stage.gateways_up, "the gateway")
            yield stage
        finally:
            nbdkit.terminate()
            nbdkit.wait(60)


def fio(stage: Stage, volume: str, depth: int, folder: Path) -> tuple[int, int]:
    """Random write and verify through the gateway; (reads, writes) as fio counts them."""
    uri = f"nbd+unix:///{volume}?socket={stage.agents[0].socket(stage)}"
    options = (
        f"--name=job --ioengine=nbd --uri={uri} --rw=randwrite --bsrange=4k-64k --size=16M --iodepth={depth} "
        "--verify=crc32c --verify_fatal=1 --randseed=7 --thread --output-format=json"
    )
    done = subprocess.run(
        ["fio", *options.split()], capture_output=True, text=True, cwd=folder, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    assert job["error"] == 0
    return job["read"]["total_ios"], job["write"]["total_ios"]


def row(rows: list[dict[str, Any]], volume: str) -> dict[str, Any]:
    return next(item for item in rows if item["volume"] == volume)


@pytest.mark.parametrize("volume", ["remote", "local"])
def test_every_place_agrees_with_fio(fio_stage: Stage, volume: str, tmp_path: Path) -> None:
    reads = writes = 0
    for depth in (1, 32):
        more_reads, more_writes = fio(fio_stage, volume, depth, tmp_path)
        reads, writes = reads + more_reads, writes + more_writes
    expected = (reads, writes)

    def in_the_api() -> tuple[int, int] | None:
        known = [item for item in fio_stage.get("volumes")["items"] if item["volume"] == volume]
        found = (known[0]["reads"], known[0]["writes"]) if known else None
        return found if found == expected else None

    assert fio_stage.wait(in_the_api, f"{expected} reads and writes of {volume} in the API") == expected
    table = json.loads(fio_stage.sla("get", "volumes", "-o", "json").stdout)
    listed = row(table["items"] if isinstance(table, dict) else table, volume)
    assert (listed["reads"], listed["writes"]) == expected
    assert totals_in_sql(fio_stage, volume) == expected
    from tests.support.browser import text_of

    page = text_of(f"http://127.0.0.1:{fio_stage.api_port}/volumes", f'[data-volume="{volume}"] [data-total]')
    assert page.replace(",", "").replace("\u202f", "").replace("\u00a0", "").split()[0] == str(reads + writes)


def totals_in_sql(stage: Stage, volume: str) -> tuple[int, int]:
    """Sums read from the database file itself: lifetime sums, and rollups beside them."""
    import sqlite3

    database = next((stage.folder / "data").glob("*.db"))
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        lifetime = connection.execute(
            "select sum(reads), sum(writes) from streams where volume = ?", (volume,)
        ).fetchone()
        rolled_up = connection.execute(
            "select sum(r.reads), sum(r.writes) from rollups r join streams s using (stream_id) "
            "where s.volume = ?",
            (volume,),
        ).fetchone()
    assert lifetime == rolled_up, "the rollups hold the same I/Os as the lifetime sums"
    return int(lifetime[0]), int(lifetime[1])
