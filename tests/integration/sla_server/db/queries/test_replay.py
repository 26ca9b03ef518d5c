"""Stored slots for ``sla simulate --stored``: SQL and files together, and a contention that is replayed."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL
from pmdaemon.wire.kinds import Kind
from sla_server.agreements.load import load_documents
from sla_server.cli.main import cli
from sla_server.db.errors import FileDamaged
from sla_server.db.queries import replay
from sla_server.db.queries.replay import SUMS, read_slots
from sla_server.db.queries.replay_cuts import read_cuts
from sla_server.services.control.simulation import Simulation
from sla_server.simulate.loads import Application, IoLog, Load, arrivals
from tests.support.archive import HOUR_US, FilesRig
from tests.support.samples import (
    T0,
    Model,
    cuts_message,
    gateway_message,
    make_cut,
    record_message,
    stream,
    streams_message,
)
from tests.support.simulate import AGREEMENT
from tests.support.worlds import controller

RATE = """\
  - name: rate
    indicator: {metric: iops}
    promised_iops: 50
    budgeting: {method: timeslices, slice: 30s, target: 0.99}
"""


@pytest.fixture
def rig(database):
    made = FilesRig(database, rollups_after_h=2)
    yield made
    made.close()


def summed(found) -> dict:
    keys = zip(found.slots["slot_us"].tolist(), found.slots["stream_id"].tolist(), strict=True)
    return {key: {name: int(found.slots[name][n]) for name in SUMS} for n, key in enumerate(keys)}


def test_cuts_of_some_slots_are_read_from_the_files_that_have_them(rig, database):
    items = rig.files_of_cuts(3, per_file=50)  # a cut a second, so the second minute is in two files
    slot_us = T0 + 60_000_000

    def read(most_rows: int = 10**6, streams: tuple[int, ...] = (1,)) -> list[tuple[int, int, int]]:
        wanted = {stream(number) for number in streams}
        found = read_cuts(database.config, database.data_dir, wanted, [slot_us], 60_000_000, most_rows)
        columns = (found[name].tolist() for name in ("start_us", "stream_id", "arrived"))
        return sorted(zip(*columns, strict=True))

    def rows(items, *numbers: int) -> list[tuple[int, int, int]]:
        within = [cut for cut in items if slot_us <= cut.start_unix_us < slot_us + 60_000_000]
        wanted = {stream(number) for number in numbers}
        return sorted(
            (
                cut.start_unix_us,
                int(cut.counters[COL["stream_id"], row]),
                int(cut.counters[COL["arrived"], row]),
            )
            for cut in within
            for row in range(cut.counters.shape[1])
            if int(cut.counters[COL["stream_id"], row]) in wanted
        )

    assert len(rows(items, 1)) == 60
    assert read() == rows(items, 1)
    assert read(streams=(1, 2)) == rows(items, 1, 2)
    assert read(most_rows=1) == rows(items[100:], 1), "the newest file first, and as a whole"
    assert read(streams=()) == []
    assert not len(read_cuts(database.config, database.data_dir, {stream(1)}, [], 60_000_000)["arrived"])
    (newest,) = (row for row in rig.rows() if row.kind == "cuts" and row.max_us > slot_us + 50_000_000)
    Path(rig.files.path_for_readers(newest.path)).unlink()
    with pytest.raises(FileDamaged):
        read()


def expected(items) -> dict:
    sums = defaultdict(dict)
    for key, row in Model.of(items).slots.items():
        sums[key] = {name: row[name] for name in SUMS}
    return dict(sums)


def test_rows_of_sql_and_files_are_added_up_and_kept_within_the_time(rig, database, monkeypatch):
    items = [make_cut(n + 1, start_us=T0 + n * 20_000_000) for n in range(12)]
    rig.feed(gateway_message(), streams_message(), cuts_message(items))
    found = read_slots(database.config, database.data_dir, T0, T0 + HOUR_US)
    assert summed(found) == expected(items)
    assert found.slot_s == 60
    assert {(s["volume"], s["gateway"]) for s in found.streams.values()} == {
        ("vol-1", "gw-1"),
        ("vol-2", "gw-1"),
    }
    rig.clock.advance(5 * 3600)
    rig.step()
    assert {row.kind for row in rig.rows()} >= {"rollups", "missed"}, "they have moved"
    late = make_cut(13, start_us=T0 + 5_000_000)
    rig.feed(cuts_message([late]))
    found = read_slots(database.config, database.data_dir, T0, T0 + HOUR_US)
    assert summed(found) == expected([*items, late])
    model = Model.of([*items, late])
    columns = (found.missed[name].tolist() for name in found.missed)
    assert {row[:4]: list(row[4:]) for row in zip(*columns, strict=True)} == {
        key: counts[:2] for key, counts in model.missed.items()
    }
    part = read_slots(database.config, database.data_dir, T0 + 60_000_000, T0 + 120_000_000)
    assert {slot for slot, _ in summed(part)} == {T0 + 60_000_000}
    assert summed(part) == {k: v for k, v in expected(items).items() if k[0] == T0 + 60_000_000}
    monkeypatch.setattr(replay, "MOST_ROWS", 3)
    with pytest.raises(replay.TooManyRows, match="Choose a shorter time"):
        read_slots(database.config, database.data_dir, T0, T0 + HOUR_US)


def test_a_damaged_file_is_named(rig, database):
    rig.feed(gateway_message(), streams_message(), cuts_message([make_cut(1)]))
    rig.clock.advance(5 * 3600)
    rig.step()
    (row,) = [row for row in rig.rows() if row.kind == "rollups"]
    Path(rig.files.path_for_readers(row.path)).write_bytes(b"x" * row.bytes)
    with pytest.raises(FileDamaged):
        read_slots(database.config, database.data_dir, T0, T0 + HOUR_US)


def observed_world(seconds: int, joins_s: int) -> Simulation:
    """Gold alone, then beside a greedy neighbour, with nobody who acts; its cuts are in ``sim.cuts``."""
    sim = Simulation(controller(()), 1)
    front, back = sim.gateway("A", ["gold"], {"gold": [12_000]}), sim.gateway("B", ["big"])
    loads = Load(volume="gold", iops=60), Load(volume="big", depth=16, from_s=joins_s)
    gold, big = (Application(g, g.volumes[0], "client", IoLog()) for g in (front, back))
    gold.replay(arrivals(loads[0], seconds, sim.world.random))
    big.hold(loads[1], seconds, sim.world.random)
    sim.cuts = []
    sim.controller.add_cut = lambda cut, *_rest: sim.cuts.append(cut)
    sim.run(seconds)
    return sim


def slice_row(state: str, start_us: int) -> dict:
    """Of a minute of gold/latency."""
    return {
        **{"name": "gold", "objective": "latency", "start_us": start_us, "revision": 0, "version": 1},
        **{"length_us": 60_000_000, "state": state, "n": 600, "missed": 40, "offered_iops": 10.0},
        **{"threshold_us": 12_000, "coverage_ratio": 1.0, "inexact": False, "ours": False},
        **{"judged_us": start_us + 90_000_000, "reason": "", "measured": None, "failed": 0},
    }


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_what_enforce_would_have_done_with_what_was_stored(rig, database, tmp_path):
    sim = observed_world(180, 120)
    for made in sim.gateways.values():
        rig.feed(
            gateway_message(gw=made.gateway_id, name=made.name, exports=[]),
            frame.encode(Kind.STREAMS_SEEN, {"gw": made.gateway_id, "streams": made.streams()}),
        )
    rig.feed(cuts_message(sim.cuts))
    (loaded,) = load_documents(AGREEMENT, 1)
    spec = loaded.agreement.spec_json()
    row = {"name": "gold", "version": 1, "document": loaded.text, "spec": spec, "applied_us": T0}
    rig.feed(record_message([("agreements", row)]))
    judged = [("good", 0), ("bad", 60), ("no_data", 120)]
    rig.feed(record_message([("slices", slice_row(state, T0 + at_s * 1_000_000)) for state, at_s in judged]))
    config = tmp_path / "server.toml"
    config.write_text(
        f'data_dir = "{database.data_dir}"\n[database]\nurl = "{database.config.url}"\n', encoding="utf-8"
    )
    base = ["simulate", "--config", str(config), "--stored", "3m", "--until", "2027-01-15T08:03"]
    modes = ("--mode", "off", "--mode", "enforce")
    done = CliRunner().invoke(cli, [*base, *modes, "-o", "json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    tree = json.loads(done.stdout)
    assert tree["spans"] == [[0.0, 180.0]], "the minute of contention, and two before it"
    assert tree["start_unix_us"] == T0
    off, enforce = (mode["agreements"][0]["bad_s"] for mode in tree["modes"])
    assert off >= 50
    assert enforce <= 20
    ms = tree["devices"]["disk"]["read"][0]["ms"] / tree["devices"]["disk"]["servers"]
    assert ms == pytest.approx(2, rel=0.1)
    assert tree["loads"] == "stored load in slots of 60 s, 2027-01-15 08:00 to 2027-01-15 08:03 UTC"
    assert tree["notes"][0].startswith("Resolution: 60 s.")
    then = "Judged then: gold/latency 1 bad of 3 slices (1 without data): by the versions and caps in force"
    assert [note for note in tree["notes"] if note.startswith(then)]
    slas = tmp_path / "slas"
    slas.mkdir()
    (slas / "gold.yaml").write_text(AGREEMENT + RATE)
    (slas / "simulation.yaml").write_text("devices: {disk: {servers: 4}}\n")
    named = [*base, *modes, "--slas", str(slas), "-o", "json"]
    other = CliRunner().invoke(cli, named, catch_exceptions=False)
    tree = json.loads(other.stdout)
    assert [each["metric"] for each in tree["modes"][0]["agreements"]] == ["latency", "iops"]
    assert tree["notes"][-1].startswith("simulation.yaml is not used: --stored brings loads")
    early = CliRunner().invoke(cli, [*base[:4], "10m", "--until", "2027-01-14T08:00"])
    assert (early.exit_code, "no I/O is stored of that time" in early.stderr) == (66, True)


def test_a_sample_has_some_streams_and_the_sum_of_the_others_whatever_the_size(rig, database, monkeypatch):
    items = [make_cut(n + 1, start_us=T0 + n * 20_000_000) for n in range(12)]
    rig.feed(gateway_message(), streams_message(), cuts_message(items))
    window = database.config, database.data_dir, T0, T0 + HOUR_US
    whole = read_slots(*window)
    one, *others = sorted(set(whole.slots["stream_id"].tolist()))
    assert others
    names = {"volume": "others", "client": "c", "backend": "disk", "gateway": "g"}
    sample = replay.StreamSample({one: one} | dict.fromkeys(others, -1), {-1: names})
    monkeypatch.setattr(replay, "MOST_ROWS", 1)
    with pytest.raises(replay.TooManyRows):
        read_slots(*window)
    for _ in range(2):  # in SQL; then in files
        found = read_slots(*window, sample)
        assert found.streams == {one: whole.streams[one], -1: names}
        for part, of_sample in ((whole.slots, found.slots), (whole.missed, found.missed)):
            for name in part.keys() - {"stream_id", "slot_us", "io", "threshold_us"}:
                for chosen, instead in ((one, one), (None, -1)):
                    mine = part["stream_id"] == one if chosen else part["stream_id"] != one
                    expected_sum = part[name][mine].sum()
                    assert of_sample[name][of_sample["stream_id"] == instead].sum() == expected_sum, name
        assert len(found.slots["slot_us"]) == 2 * len(set(whole.slots["slot_us"].tolist()))
        rig.clock.advance(5 * 3600)
        rig.step()
    monkeypatch.setattr(replay, "MOST_READ", 1)
    with pytest.raises(replay.TooManyRows):
        read_slots(*window, sample)
