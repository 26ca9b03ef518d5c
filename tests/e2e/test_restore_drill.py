"""The drill of docs/operations/backup.md by its commands: the data directory is lost, and comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.e2e.conftest import Driver, whole_product
from tests.support.stage import Stage


def stored_ios(stage: Stage) -> dict[str, int]:
    """Lifetime reads and writes of each volume, as the database has them."""
    return {row["volume"]: row["reads"] + row["writes"] for row in stage.get("volumes")["items"]}


def load_until_stored(stage: Stage, driver: Driver, before: int) -> int:
    """I/Os on a volume, some hundred, until all of them are stored; returns how many there are then."""
    load = driver.start(stage.agents[0].socket(stage), "erp-db", rate_iops=80)
    stage.wait(lambda: len(load.done) > 300, "load")
    driver.stop(load)
    wanted = before + len(load.done)
    stage.wait(lambda: stored_ios(stage)["erp-db"] == wanted, f"{wanted} I/Os stored")
    return wanted


def kept(stage: Stage) -> dict[str, object]:
    """What people would miss."""
    return {
        "agreements": [(row["name"], row["version"]) for row in stage.get("slas")["items"]],
        "audit": {row["audit_id"] for row in stage.get("audit")["items"]},
        "documents": [(row["name"], row["version"]) for row in stage.get("recipients")["items"]],
    }


def test_a_lost_data_directory_comes_back_from_its_backup(tmp_path: Path, driver: Driver) -> None:
    backup = tmp_path / "backup"
    with whole_product(tmp_path / "stage") as stage:
        recipient = tmp_path / "mail.yaml"
        recipient.write_text(
            "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {name: mail}\nspec: {inbox: {}}\n"
        )
        stage.sla("apply", "-f", str(recipient))
        counted = load_until_stored(stage, driver, 0)
        before = kept(stage)
        stage.sla("storage", "backup", str(backup))
        stage.set_mode("enforce")  # after the backup: this is gone
        (server,) = stage.running("server")
        assert stage.stop("server", server) == 0
        shutil.rmtree(stage.folder / "data")

        stage.sla("storage", "restore", str(backup))
        again = stage.sla("storage", "restore", str(backup), check=False)
        assert again.returncode != 0, "over something it is refused"
        found = json.loads(stage.sla("storage", "verify", "-o", "json").stdout)
        assert found["problems"] == []
        stage.start_server()
        stage.wait(stage.gateways_up, "both gateways")
        after = kept(stage)
        assert (after["agreements"], after["documents"]) == (before["agreements"], before["documents"])
        assert before["audit"] <= after["audit"]  # type: ignore[operator]
        assert stage.get("mode")["mode"] == "observe"
        assert stored_ios(stage)["erp-db"] == counted
        assert stage.sla("audit", "verify").returncode == 0
        assert load_until_stored(stage, driver, counted) > counted, "and it goes on from there"
        stage.set_mode("enforce")  # with the token that the backup had
        stage.wait(lambda: stage.get("mode")["mode"] == "enforce", "the mode is seen")
