from __future__ import annotations

import io

from rich.console import Console

from sla_server.cli.formatting import build
from sla_server.cli.tables import KINDS
from sla_server.cli.top import SORTS, TopView, frame, trouble_of
from tests.support import api
from tests.support.cli import Terminal


def draw(snapshot: dict[str, object], trouble: str = "", view: TopView | None = None) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(frame(snapshot, trouble, view))
    return captured.get()


def test_one_picture_holds_everything_in_eighty_columns() -> None:
    text = draw(api.snapshot())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "mode enforce · 2 of 2 gateways up · 1 process restart · policy 3" in text.replace("\n", " ")
    for words in (
        "erp-gold/latency",
        "kept",
        "AT RISK",
        "p95 12.0ms",
        "batch",
        "290 weighted IOPS",
        "is kept again",
    ):
        assert words in text
    assert "dbmanager was restarted" not in text, "the sixth event"


def test_an_empty_view_says_what_to_do() -> None:
    text = draw({"at_us": 1})
    assert "mode unknown" in text
    assert "sla apply -f agreement.yaml" in text
    assert "gateway-agent run" in text


def test_promises_that_need_a_look_come_first() -> None:
    row = api.snapshot()["slas"][0]
    states = ("ok", "no-data", "idle", "at-risk", "violating")
    slas = [{**row, "name": f"s{number}", "state": state} for number, state in enumerate(states)]
    text = draw({**api.snapshot(), "slas": slas})
    places = [text.index(f"s{number}/latency") for number in (4, 3, 1, 0, 2)]
    assert places == sorted(places)


def test_filters_and_orders_say_of_how_many_they_are() -> None:
    many = {**api.snapshot(), "totals": {"slas": {"ok": 64_000}, "volumes": 5000, "throttles": 1}}
    assert "and 4,998 more: sla get volumes" in draw(many)
    assert "are live here" not in draw(many)
    none = draw(many, view=TopView(names=("s63*",), sections=("slas",)))
    assert "None of them fits what was asked for." in none
    assert "Looked at were the 3 of 64,000 that are live here: sla get slas has all" in none
    by_rate = draw(many, view=TopView(sort="rate", sections=("volumes", "throttles")))
    assert by_rate.count("are live here") == 1
    assert "the 2 of 5,000 that are live here: sla get volumes has all" in by_rate


def test_how_many_more_promises_there_are() -> None:
    assert "more: sla get slas" not in draw(api.snapshot())
    assert "and 1,297 more: sla get slas" in draw(
        {**api.snapshot(), "totals": {"slas": {"ok": 1299, "idle": 1}}}
    )


def test_before_the_first_live_view_nothing_is_claimed() -> None:
    text = draw({"at_us": 0})
    assert "not known yet" in text
    assert "sla apply" not in text
    assert "Nobody" not in text


def test_a_database_that_cannot_be_read_is_said_and_the_live_view_kept() -> None:
    why = "the database postgresql://h/d cannot be used: connection refused. Check that it runs"
    fresh = {**api.snapshot(), "server": {"stale": False, "age_s": 0.1, "database": why}}
    said = trouble_of(fresh)
    assert said.startswith("The database postgresql://h/d cannot be used")
    assert "Live values go on" in said
    text = draw(fresh, said)
    assert "connection refused" in text
    assert "erp-gold/latency" in text
    starting = trouble_of({"server": {"stale": True, "age_s": None, "database": why}})
    assert "connection refused" in starting
    assert "services part waits for it" in starting


def test_trouble_is_said() -> None:
    assert trouble_of({"server": {"stale": False, "age_s": 0.1}}) == ""
    assert "yet" in trouble_of({"server": {"stale": True, "age_s": None}})
    assert "No live data for 12s" in trouble_of({"server": {"stale": True, "age_s": 12.0}})
    full = {"process": "dbmanager", "what": "database", "since_us": 7, "reason": "no space left"}
    lost = {**full, "process": "rack-a", "what": "spool", "reason": "it is full"}
    said = trouble_of({"server": {"stale": False}, "problems": [full, lost]})
    assert [line.partition(",")[0] for line in said.splitlines()] == ["dbmanager", "rack-a"]
    assert said.endswith("It is full.")
    unreadable = trouble_of({"server": {"stale": False, "database": "gone"}, "problems": [full, lost]})
    assert "no space left" not in unreadable, "the reader's own words are nearer"
    assert "the link is down" in draw(api.snapshot(), "the link is down")


def test_once(sla: Terminal) -> None:
    done = sla("top", "--once")
    assert done.exit_code == 0
    assert "erp-gold/latency" in done.output
    assert "\x1b" not in done.output


def test_a_large_installation_counts_what_is_not_listed() -> None:
    totals = {"gateways": {"up": 3990, "lost": 10}}
    assert "3990 of 4000 gateways up" in draw({**api.snapshot(), "totals": totals}).replace("\n", " ")


ESCAPES = "\x1b]0;pwned\x07\x9b31m\r\u202e"


def test_no_escape_sequence_of_a_gateway_reaches_the_terminal() -> None:
    """Rich strips BEL and leaves ESC."""
    snapshot = api.snapshot()
    for name in ("events", "throttles", "slas", "volumes", "problems"):
        for row in snapshot.get(name, []):
            row.update({key: value + ESCAPES for key, value in row.items() if isinstance(value, str)})
    drawn = draw(snapshot, f"one\ntwo{ESCAPES}")
    assert "pwned" in drawn
    assert all(character.isprintable() for line in drawn.split("\n") for character in line)


def test_no_table_passes_control_characters() -> None:
    for kind in KINDS.values():
        row = dict.fromkeys(
            ("name", "state", "volume", "backend", "address", "text", "kind", "subject", "severity"),
            f"x{ESCAPES}",
        )
        row |= {
            "source": ESCAPES,
            "reason": ESCAPES,
            "published_by": ESCAPES,
            "version": ESCAPES,
            "who": ESCAPES,
        }
        columns = [column for column in kind.columns if not column.number]
        text = Console(width=200, record=True, file=io.StringIO())
        text.print(build(columns, [row], 0))
        drawn = text.export_text()
        assert "x" in drawn or kind.of, "which has dates and numbers only"
        assert all(character.isprintable() for line in drawn.split("\n") for character in line), kind.path


def rows_of(section: str, **view: object) -> list[str]:
    shown = TopView(**view).of(section, api.snapshot()[section])  # type: ignore[arg-type]
    return [str(row.get("name") or row.get("volume")) for row in shown]


def test_sorting() -> None:
    assert rows_of("slas") == ["reports", "erp-gold", "scratch"], "what needs a look comes first"
    assert rows_of("slas", sort="latency") == ["reports", "erp-gold", "scratch"], "no value comes last"
    assert rows_of("slas", sort="latency", is_reversed=True) == ["erp-gold", "reports", "scratch"]
    assert rows_of("slas", sort="name") == ["erp-gold", "reports", "scratch"]
    assert rows_of("volumes", sort="iops") == ["batch", "erp-db"]
    assert rows_of("volumes", sort="iops", is_reversed=True) == ["erp-db", "batch"]
    assert rows_of("volumes", sort="latency") == ["batch", "erp-db"]
    shown = {section: api.snapshot()[section][0] for section in ("slas", "volumes")}
    late = {"burn_1h", "target"}  # of newer services
    assert all(key in shown[section] or key in late for keys in SORTS.values() for section, key, _ in keys)


def test_filters() -> None:
    assert rows_of("slas", names=("erp-*",)) == ["erp-gold"]
    assert rows_of("volumes", names=("disk-0",)) == ["erp-db", "batch"], "a backend's"
    assert rows_of("slas", states=("idle", "at-risk")) == ["reports", "scratch"]
    assert rows_of("slas", agreements=frozenset(["scratch"])) == ["scratch"]
    assert rows_of("throttles", agreements=frozenset(["erp-gold"])) == ["batch"]
    assert rows_of("throttles", agreements=frozenset(["scratch"])) == []


def test_what_is_cut_is_counted(sla: Terminal) -> None:
    shown = sla("top", "--once", "--rows", "1", "--only", "slas", "--only", "volumes").output
    assert "and 2 more: sla get slas" in shown
    assert "and 1 more: sla get volumes" in shown
    assert "is kept again" not in shown
    assert "Nobody" not in shown


def test_options_of_the_command(sla: Terminal) -> None:
    shown = sla("top", "--once", "-l", "customer in (acme)", "--only", "slas").output
    assert "erp-gold" in shown
    assert "reports" not in shown
    assert "None of them fits" in sla("top", "zzz", "--once", "--only", "volumes").output
    wrong = sla("top", "--once", "-l", "=")
    assert (wrong.exit_code, "is no label" in wrong.stderr) == (2, True)
