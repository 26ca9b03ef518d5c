"""The overview in a real browser, over the real web server and a *fake* live feed: layout and behaviour.

The other views are in ``test_views``, ``test_agreement_page``, ``test_inbox`` and ``test_pools_page``. What
the page shows in a real run is tested by test_cycle and test_counts; here the states are made up, so that
each can be looked at.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from pmdaemon.errors import ConfigError
from pmdaemon.mailbox import attach, create_segment
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.api.config import WORKER_THREADS, ApiConfig
from sla_server.api.server import open_listener, run
from sla_server.cli.client import Client
from sla_server.db.config import DatabaseConfig
from sla_server.events.recipients.config import NotifyConfig
from sla_server.topology import app_layout
from tests.support import api
from tests.support.browser import (
    OVER_A_SILENCE,
    WORDS_OF_A_LOOP,
    Page,
    console_errors,
    from_module,
    reshape,
    settle,
    take_screenshot,
    take_session,
    text_of,
    until,
    wait_for,
)
from tests.support.ports import free_port
from tests.support.site import Site

pytestmark = pytest.mark.e2e
NARROW_PX, HALF_PX, WIDE_PX = 400, 1024, 1280


def text(driver: Chrome, css: str) -> str:
    return str(driver.find_element(By.CSS_SELECTOR, css).text)


def sign_in(driver: Chrome, site: Site, view: str) -> None:
    take_session(driver, site.url, site.server.context.logins.issue())
    driver.get(f"{site.url}{view}")


def ask(site: Site, path: str) -> http.client.HTTPResponse:
    """One request on a connection of its own, which ends with the answer's close."""
    connection = http.client.HTTPConnection("127.0.0.1", site.server.port, timeout=60)
    connection.request("GET", path, headers={"Connection": "close"})
    return connection.getresponse()


def axis_of(driver: Chrome) -> tuple[float, float]:
    """First and last time of the chart's axis, in s."""
    script = "return document.getElementById('plot').layout.xaxis.range.map((at) => new Date(at).getTime())"
    first, last = driver.execute_script(script)
    return first / 1000, last / 1000


def test_the_chart_begins_with_the_first_sample(tmp_path: Path, page: Page) -> None:
    site = Site(api.data_dir(tmp_path), snapshot=None)
    try:
        began_s = time.time()
        idle = [{**api.snapshot()["slas"][0], "latency_us": None}]
        for ago_s in range(600, 0, -1):  # ten minutes without an agreement, then with one, but no I/O
            slas = [] if ago_s > 300 else idle
            site.server.context.live.put(api.snapshot(round((began_s - ago_s) * 1e6), slas=slas))
        site.snapshot = api.snapshot
        with page(WIDE_PX, 900) as driver:
            driver.get(site.url)
            until(driver, lambda: "of 12.0 ms" in text(driver, "#chart-title"), "the newest values are shown")
            wait_for(driver, "#plot .main-svg")
            # The title changes before the chart, which may still show the minutes without I/O.
            until(driver, lambda: axis_of(driver)[0] >= began_s - 1, "the axis begins with the first sample")
            first_s, last_s = axis_of(driver)
            assert first_s <= time.time()
            # The axis is a minute at least, and no longer than the page has been fed.
            assert 60 <= last_s - first_s < max(60.0, time.time() - began_s) + 15
            title = text(driver, "#chart-title")  # before the trends of the page are replaced below
            assert "of the last 15 min" not in title
            assert title.partition("; now ")[2].startswith("9.20 ms of 12.0 ms, kept.")
            assert from_module(driver, "chart.js", OVER_A_SILENCE).count("M") == 2, "no line is drawn over it"
            assert "to keep b/x, a/x" in from_module(driver, "format.js", WORDS_OF_A_LOOP)
            states = ["ok", "at-risk", "idle", "out-of-curve", "not-known-yet"]
            words = ["kept", "at risk", "idle", "above demand", "not-known-yet"]
            assert from_module(driver, "format.js", f"{states}.map(m.stateWords)") == words
            kinds = '["violation-opened", "unattributed", "infeasible", "cut-lost"].map(m.eventKind)'
            assert from_module(driver, "words.js", kinds) == [
                "promise broken", "no cause found", "more promised than there is", "statistics lost"
            ]  # fmt: skip
            counts = '[0, 1, 2, 1200].map((n) => m.plural(n, "volume"))'
            assert from_module(driver, "format.js", counts) == [
                "0 volumes", "1 volume", "2 volumes", "1,200 volumes"
            ]  # fmt: skip
            budgets = "[[0.5, 30], [-1.8, 0], [1, null]].map(([budget_remaining, budget_minutes_left]) => "
            budgets += "m.budgetRest({budget_remaining, budget_minutes_left}))"
            assert from_module(driver, "format.js", budgets) == [
                "30 min of bad time", "more bad time than allowed", ""
            ]  # fmt: skip
            burnt = "[0, 0.04, 7.2, 14].map((burn_1h) => m.burn({burn_1h})[0])"
            assert from_module(driver, "format.js", burnt) == ["0 ×", "0.0 ×", "7.2 ×", "14 ×"]
            november = "{from_us: 1793487600e6, to_us: 1796079600e6}"  # of Berlin
            days = [f"m.daysOfPeriod({november}, {zone})" for zone in ('"Europe/Berlin"', '"UTC"', "null")]
            found = from_module(driver, "format.js", f"[{', '.join(days)}]")
            assert found == [["1 Nov 2026", "30 Nov 2026"], None, None]
    finally:
        site.close()
        site.mailbox.close()


def test_seventy_open_pages_do_not_hang_the_api(site: Site) -> None:
    answers = [ask(site, "/api/v1/live/stream") for _ in range(70)]
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 503]
    assert len(served) == site.server.config.live_streams_max == 64
    assert len(refused) == 6
    for answer in refused:
        assert int(answer.headers["Retry-After"]) > 0
        assert "live?since=" in json.loads(answer.read())["fix"]
    for _ in range(2 * WORKER_THREADS):
        assert json.loads(ask(site, "/api/v1/live").read())["mode"] == "enforce"
    for answer in served:
        assert answer.readline().startswith(b"retry:")
        answer.close()
    end_s = time.monotonic() + 60
    while site.server.context.live.streams:
        assert time.monotonic() < end_s, "places are given back when the pages are gone"
        time.sleep(0.05)
    again = ask(site, "/api/v1/live/stream")
    assert again.status == 200
    again.close()


TWENTY_FIVE = """m.daysOf(Array.from({length: 25},
  (_, at) => ({hour_us: Date.UTC(2026, 9, 24, 22 + at) * 1000, at})), (hour) => ({at: hour.at}))"""
"""Of heat.js: the hours of 2026-10-25 in Berlin."""


def test_a_day_of_25_hours_shows_them_all(site: Site, page: Page) -> None:
    with page() as driver:
        driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Europe/Berlin"})
        driver.get(site.url)
        day, again = from_module(driver, "heat.js", TWENTY_FIVE)
        assert [cell["at"] for cell in day["cells"]] == [0, 1, 2, *range(4, 25)]
        assert [(hour, cell["at"]) for hour, cell in enumerate(again["cells"]) if cell] == [(2, 3)]
        assert again["label"] == f"{day['label']}, again"


def test_since_when_is_of_the_state_that_is_shown(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(site.url)
        asked = "m.factsNow({state: 'ok', since_us: 5, customer: 'acme'}, {state: %r})"
        assert from_module(driver, "cells.js", asked % "ok") == {"customer": "acme", "since_us": 5}
        assert from_module(driver, "cells.js", asked % "violating") == {"customer": "acme", "since_us": None}


def test_the_page_shows_everything_within_its_width(site: Site, page: Page) -> None:
    going_on = {**api.EPISODE, "opened_us": site.source.now_us - 60_000_000, "closed_us": None}
    site.source.__dict__["episodes"] = lambda *_asked, **_more: [going_on]
    with page(390, 900) as driver:
        driver.get(site.url)
        wait_for(driver, "[data-throttle]")
        until(driver, lambda: "for acme" in text(driver, "[data-sla='erp-gold/latency']"), "for whom")
        settle(driver)
        for width, dark in [(390, False), (HALF_PX, False), (WIDE_PX, True), (1440, False)]:
            reshape(driver, width, 900, dark=dark)
            shows_everything(driver, width)
        assert console_errors(driver) == []


def shows_everything(driver: Chrome, width: int) -> None:
    widths = "return [...document.querySelectorAll('.badge')].map(each => each.offsetWidth)"
    assert max(driver.execute_script(widths)) < width / 3, "a badge is no wider than its word"
    assert "kept" in text(driver, "[data-sla='erp-gold/latency']")
    assert "batch held to 290 weighted IOPS" in text(driver, "[data-sla='erp-gold/latency']")
    assert "nobody is throttled for it" in text(driver, "[data-sla='reports/latency']")
    assert "violated since" in text(driver, "#episodes li")
    assert "at risk" in text(driver, "[data-sla='reports/latency']")
    assert "p95 of erp-gold was 15.1 ms" in text(driver, "[data-throttle]")
    assert "1 at risk; 1 volume throttled" in text(driver, "#summary")
    assert text(driver, "#gateway-tally") == "Gateways: 2 up."
    assert "Nothing of the server is in trouble" in text(driver, "#problem-tally")
    wide = [
        part.get_attribute("aria-labelledby")
        for part in driver.find_elements(By.CSS_SELECTOR, "section")
        if part.get_property("scrollWidth") > part.get_property("clientWidth")
    ]
    assert wide == []


def test_a_reader_without_session_can_change_nothing(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(site.url)
        wait_for(driver, "[data-throttle]")
        until(driver, lambda: "sla login" in text(driver, "#session"), "the way to sign in is told")
        assert all(
            not button.is_enabled() for button in driver.find_elements(By.CSS_SELECTOR, "#mode button")
        )
        driver.get(f"{site.url}volumes")
        wait_for(driver, "[data-volume=batch]")
        until(driver, lambda: "sla login" in text(driver, "#session"), "asked here, too")
        assert driver.find_elements(By.CSS_SELECTOR, "#volumes button") == []


def test_mode_throttle_and_release_by_keyboard(site: Site, page: Page) -> None:
    manual = {**api.snapshot()["throttles"][0], "throttle_id": "t-2", "source": "manual", "victim": ""}
    site.snapshot = lambda at_us: api.snapshot(at_us, throttles=[*api.snapshot(at_us)["throttles"], manual])
    with page() as driver:
        sign_in(driver, site, "volumes")
        wait_for(driver, "[data-volume=batch] button", visible=True)
        driver.find_element(By.CSS_SELECTOR, "[data-mode=observe]").send_keys(Keys.ENTER)
        wait_for(driver, "#ask-dialog[open]")
        until(driver, lambda: "holds nobody back any more" in text(driver, "#ask-dialog"), "what it means")
        driver.find_element(By.CSS_SELECTOR, "#ask-dialog [value=cancel]").click()
        until(
            driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "dialog[open]"), "nothing was asked for"
        )
        driver.find_element(By.CSS_SELECTOR, "[data-mode=observe]").send_keys(Keys.ENTER)
        wait_for(driver, "#ask-dialog[open]")
        driver.find_element(By.ID, "ask-apply").send_keys(Keys.ENTER)
        until(driver, lambda: len(site.mailbox.posted) == 1, "the switch was asked for")
        until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "dialog[open]"), "it is switched")
        driver.find_element(By.CSS_SELECTOR, "[data-volume=batch] button").send_keys(Keys.ENTER)
        wait_for(driver, "#throttle-dialog[open]")
        driver.find_element(By.NAME, "rate").send_keys("2.5")
        Select(driver.find_element(By.NAME, "unit")).select_by_value("bytes_per_s")
        driver.find_element(By.NAME, "reason").send_keys("backup window", Keys.ENTER)
        until(driver, lambda: len(site.mailbox.posted) == 2, "both changes were asked for")
        until(
            driver,
            lambda: not driver.find_elements(By.CSS_SELECTOR, "#throttle-dialog[open]"),
            "dialog closed",
        )
        driver.find_elements(By.CSS_SELECTOR, "[data-volume=batch] button")[1].send_keys(Keys.ENTER)
        until(driver, lambda: "is free at once" in text(driver, "#ask-dialog"), "what it means")
        assert len(site.mailbox.posted) == 2, "nothing is released without a question"
        driver.find_element(By.ID, "ask-apply").send_keys(Keys.ENTER)
        until(driver, lambda: len(site.mailbox.posted) == 3, "the release was asked for")
    asked = [(header["op"], header["body"]) for header in site.mailbox.posted]
    assert asked[0] == ("mode", {"mode": "observe"})
    expected = {"volume": "batch", "bytes_per_s": 2.5e6, "duration_s": 600.0, "reason": "backup window"}
    assert asked[1] == ("throttle_set", expected)
    assert asked[2] == ("throttle_release", {"volume": "batch", "throttle_id": None})


def test_a_refused_throttle_says_why_in_the_dialog(site: Site, page: Page) -> None:
    site.mailbox.answer = lambda _header: (
        False,
        409,
        {"errors": [{"line": 0, "problem": "below the floor of 500 IOPS", "fix": "Give more"}]},
    )
    with page() as driver:
        sign_in(driver, site, "volumes")
        wait_for(driver, "[data-volume=batch] button", visible=True)
        driver.find_element(By.CSS_SELECTOR, "[data-volume=batch] button").send_keys(Keys.ENTER)
        driver.find_element(By.NAME, "rate").send_keys("1")
        driver.find_element(By.NAME, "reason").send_keys("try", Keys.ENTER)
        wait_for(driver, "#throttle-form .problem", visible=True)
        assert text(driver, "#throttle-form .problem") == "below the floor of 500 IOPS. Give more"


def test_a_throttle_that_breaks_a_promise_is_set_all_the_same_on_demand(site: Site, page: Page) -> None:
    refusal = {"errors": [{"line": 0, "problem": "below what is promised", "fix": "--force"}]}
    site.mailbox.answer = lambda header: (
        (True, 200, {"throttle_id": "t"}) if header["body"].get("force") else (False, 409, refusal)
    )
    with page() as driver:
        sign_in(driver, site, "volumes")
        wait_for(driver, "[data-volume=batch] button", visible=True)
        driver.find_element(By.CSS_SELECTOR, "[data-volume=batch] button").send_keys(Keys.ENTER)
        assert not driver.find_element(By.NAME, "force").is_displayed()
        driver.find_element(By.NAME, "rate").send_keys("1")
        driver.find_element(By.NAME, "reason").send_keys("try", Keys.ENTER)
        wait_for(driver, "[name=force]", visible=True)
        driver.find_element(By.NAME, "force").send_keys(Keys.SPACE)
        driver.find_element(By.NAME, "reason").send_keys(Keys.ENTER)
        until(
            driver,
            lambda: not driver.find_elements(By.CSS_SELECTOR, "#throttle-dialog[open]"),
            "dialog closed",
        )
    assert [header["body"].get("force") for header in site.mailbox.posted] == [None, True]


@pytest.mark.parametrize("width", [WIDE_PX, NARROW_PX])
def test_the_detail_says_why(site: Site, page: Page, width: int) -> None:
    with page(width, 900) as driver:
        driver.get(f"{site.url}volumes")
        wait_for(driver, "[data-volume=batch] a.why")
        driver.find_element(By.CSS_SELECTOR, "[data-volume=batch] a.why").send_keys(Keys.ENTER)
        until(driver, lambda: "to keep erp-gold" in text(driver, "#why-headline"), "the answer is shown")
        assert text(driver, "#why-headline").startswith("batch is throttled to 290 weighted IOPS")
        assert text(driver, "#why-status") == "throttled"
        sections = text(driver, "#why-sections")
        assert "batch: 87 %, 581 weighted IOPS (best-effort, throttled to 290 weighted IOPS)" in sections
        assert driver.current_url.endswith("/volumes#why/volume/batch")
        overflow = "const d = arguments[0]; return d.scrollWidth - d.clientWidth"
        assert driver.execute_script(overflow, driver.find_element(By.ID, "why-dialog")) <= 0
        driver.find_element(By.ID, "why-close").click()
        until(driver, lambda: "#why" not in driver.current_url, "the address is that of the view again")
        driver.get(site.url)
        wait_for(driver, "[data-sla='erp-gold/latency'] a.why")
        driver.find_element(By.CSS_SELECTOR, "[data-sla='erp-gold/latency'] a.why").click()
        until(driver, lambda: "erp-gold/latency is kept" in text(driver, "#why-headline"), "the promise")
        assert text(driver, "#why-title") == "erp-gold/latency"


def test_the_detail_of_then_and_of_an_unknown_name_by_address(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}#why/volume/bach")
        until(driver, lambda: "Near it: batch" in text(driver, "#why-headline"), "near names")
        driver.get(f"{site.url}#why/volume/batch")
        until(driver, lambda: "batch is throttled" in text(driver, "#why-headline"), "another address")
        script = (
            "const at = document.getElementById('why-at'); at.value = arguments[0]; "
            "at.dispatchEvent(new Event('change'))"
        )
        driver.execute_script(script, "2025-01-01T12:00:00")
        until(driver, lambda: "was throttled at 2025-01-01" in text(driver, "#why-headline"), "then")
        assert "Decisions are stored from 20" in text(driver, "#why-sections")
        for moment, words in (("2099-01-01T12:00", "lies ahead of now"), ("1969-01-01T12:00", "before 1970")):
            driver.execute_script(script, moment)
            until(driver, lambda words=words: words in text(driver, "#why-headline"), "refused")
            assert text(driver, "#why-headline").startswith("At: 1 Jan ")
            assert "at_us" not in text(driver, "#why-headline")
        driver.find_element(By.ID, "why-now").click()
        until(driver, lambda: "batch is throttled" in text(driver, "#why-headline"), "now again")


def test_focus_stays_where_it_is_while_data_come_in(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(site.url)
        wait_for(driver, "[data-sla='reports/latency'] button")
        driver.execute_script("document.querySelector(\"[data-sla='reports/latency'] button\").focus()")
        at_us = site.server.context.live.newest().number
        until(driver, lambda: site.server.context.live.newest().number > at_us + 3, "three more snapshots")
        focused = driver.switch_to.active_element.get_attribute("aria-label")
        assert focused == "Show reports/latency in the chart"


INDICATORS: list[dict[str, Any]] = [
    {"objective": "p95"},
    {
        "objective": "mean",
        "metric": "mean_latency",
        "percentile": None,
        "latency_us": None,
        "measured": 4_100.0,
    },
    {"objective": "iops", "metric": "iops", "percentile": None, "measured": 950.2, "promised": 1000.0},
    {"objective": "flow", "metric": "throughput", "percentile": None, "measured": 1.5e8, "promised": 2e8},
    {
        "objective": "up",
        "metric": "availability",
        "percentile": 99.0,
        "stall_us": 900_000,
        "threshold_us": 5_000_000,
    },
    {"objective": "off", "state": "excluded", "reason": "maintenance firmware-march: new disks"},
]
SHOWN = {
    "p95": "p95",
    "mean": "4.10 ms mean 12.0 ms at most",
    "iops": "950 IOPS delivered 1,000 IOPS at least",
    "flow": "150.0 MB/s delivered 200.0 MB/s at least",
    "up": "900 ms longest stall 5.0 s at most",
    "off": "maintenance firmware-march: new disks",
}


def test_each_indicator_has_its_own_words_and_what_is_excluded_says_why(site: Site, page: Page) -> None:
    rows = [{**api.snapshot()["slas"][0], "metric": "latency", **one} for one in INDICATORS]
    for row in rows:
        if "promised" in row:
            row |= {"threshold_us": None, "latency_us": None}
    site.snapshot = lambda at_us: api.snapshot(at_us, slas=rows)
    with page(WIDE_PX, 900) as driver:
        driver.get(site.url)
        for objective, words in SHOWN.items():
            wait_for(driver, f"[data-sla='erp-gold/{objective}'] .spark path")
            assert words in " ".join(text(driver, f"[data-sla='erp-gold/{objective}']").split())
        driver.find_element(By.CSS_SELECTOR, "[data-sla='erp-gold/up'] button").click()
        assert "longest stall of the last" in text(driver, "#chart-title")
        driver.find_element(By.CSS_SELECTOR, "[data-sla='erp-gold/iops'] button").click()
        assert not driver.find_element(By.ID, "chart").is_displayed(), "its axis is of latencies"
        assert driver.execute_script("return document.documentElement.scrollWidth") <= WIDE_PX


def test_a_long_table_shows_what_needs_a_look_and_leads_to_the_rest(site: Site, page: Page) -> None:
    row = api.snapshot()["slas"][0]
    slas = [{**row, "name": f"s{number:03}", "state": "ok"} for number in range(120)]
    slas[119]["state"] = "violating"
    site.snapshot = lambda at_us: api.snapshot(at_us, slas=slas)
    with page(WIDE_PX, 900) as driver:
        driver.get(site.url)
        wait_for(driver, "#slas tbody tr:first-child[data-sla='s119/latency']")
        assert len(driver.find_elements(By.CSS_SELECTOR, "#slas tbody tr")) == 50
        assert "Shown are 50 of 120 promises" in text(driver, "#all-promises")
        assert driver.find_element(By.ID, "all-promises").get_attribute("href") == f"{site.url}agreements"


def test_caps_have_their_unit_and_events_what_they_are_about(site: Site, page: Page) -> None:
    shown = api.snapshot()
    volumes = [{**row, "cap_cost_per_s": None, "cap_ops_per_s": 50.0} for row in shown["volumes"]]
    asked = {"source": "manual", "who": "ann", "victim": "", "cost_per_s": None, "ops_per_s": 20.0}
    floor = "the floor of its agreement"
    row = {**shown["throttles"][0], **asked, "text": "copy", "lifted_to": {"ops_per_s": 50.0}, "floor": floor}
    events = [{**row, "element": "gateway", "subject": "gw-a"} for row in shown["events"]]
    site.snapshot = lambda at_us: api.snapshot(at_us, volumes=volumes, throttles=[row], events=events)
    with page(390, 900) as driver:
        driver.get(f"{site.url}volumes")
        wait_for(driver, "[data-volume=batch]")
        until(driver, lambda: "50 IOPS" in text(driver, "[data-volume=batch]"), "the cap in its unit")
        driver.get(site.url)
        wait_for(driver, "[data-throttle]")
        settle(driver)
        words = text(driver, "[data-throttle]")
        assert "batch at most 50 IOPS (asked: 20 IOPS)" in words
        assert f"copy ({floor} holds)" in words
        assert "set by hand by ann" in words
        assert "promise kept again · gateway gw-a" in text(driver, "#events li")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390


def test_names_are_text_never_markup(site: Site, page: Page) -> None:
    nasty = "<img src=x onerror=document.title='owned'>"
    row = {**api.snapshot()["throttles"][0], "text": nasty}
    site.snapshot = lambda at_us: api.snapshot(at_us, throttles=[row])
    with page() as driver:
        driver.get(site.url)
        wait_for(driver, "[data-throttle] p")
        assert nasty in text(driver, "[data-throttle]")
        assert driver.title != "owned"


def test_an_empty_server_says_what_to_do_next(site: Site, page: Page) -> None:
    site.snapshot = lambda at_us: {"at_us": at_us, "mode": "observe"}
    with page() as driver:
        driver.get(site.url)
        wait_for(driver, "#slas .empty")
        body = text(driver, "body")
        for words in ("sla apply -f agreement.yaml", "gateway-agent run --config FILE", "sla policy run"):
            assert words in body
        assert "Nobody is throttled" in body


@pytest.fixture
def returning(tmp_path: Path) -> Iterator[Site]:
    """One whose port nobody else is given while it is away."""
    made = Site(api.data_dir(tmp_path), listen=f"127.0.0.1:{free_port()}")
    yield made
    made.close()
    made.mailbox.close()


def test_silence_and_a_lost_connection_are_said_and_overcome(returning: Site, page: Page) -> None:
    site = returning
    with page() as driver:
        driver.get(site.url)
        wait_for(driver, "[data-throttle]")
        site.snapshot = None
        until(driver, lambda: "No live data for" in text(driver, "#banner"), "silence of services is said")
        until(driver, site.server.context.live.is_stale, "the server knows it, too")
        driver.refresh()  # a page opened in the silence is given what was last known
        wait_for(driver, "[data-throttle]")
        until(driver, lambda: text(driver, "#feed") == "no live data", "it is said that it is old")
        port = site.server.port
        site.close()
        until(driver, lambda: "Connection to the server lost" in text(driver, "#banner"), "the loss is said")
        site.stop, site.snapshot = Stop(), api.snapshot
        site.start(f"127.0.0.1:{port}")
        until(driver, lambda: not driver.find_element(By.ID, "banner").is_displayed(), "live again by itself")
        until(driver, lambda: text(driver, "#feed") == "live", "the feed is live")
        assert text(driver, "#banner") == ""
        assert driver.find_elements(By.CSS_SELECTOR, "[data-throttle]"), "what the feed brings is shown again"


def test_what_is_in_trouble_is_said_since_when_and_why(site: Site, page: Page) -> None:
    full = {"process": "dbmanager", "what": "database", "since_us": api.NOW_US, "reason": "no space left"}
    with page() as driver:
        driver.get(site.url)
        wait_for(driver, "[data-throttle]")
        site.snapshot = lambda at_us: api.snapshot(at_us, problems=[full])
        until(driver, lambda: "No space left." in text(driver, "#banner"), "the reason")
        assert text(driver, "#banner").startswith("dbmanager, since ")
        site.snapshot = api.snapshot
        until(driver, lambda: not driver.find_element(By.ID, "banner").is_displayed(), "over")


def test_a_page_without_a_place_polls(tmp_path: Path, page: Page) -> None:
    site = Site(api.data_dir(tmp_path), live_streams_max=1)
    held = ask(site, "/api/v1/live/stream")
    try:
        with page() as driver:
            driver.get(site.url)
            wait_for(driver, "[data-throttle]")
            until(driver, lambda: text(driver, "#feed") == "live (polling)", "the page polls")
            at = text(driver, "#chart-title")
            assert at
    finally:
        held.close()
        site.close()
        site.mailbox.close()


def test_helpers_of_other_tests(site: Site, tmp_path: Path) -> None:
    shot = tmp_path / "page.png"
    take_screenshot(site.url, shot, WIDE_PX, 1000, "[data-throttle]")
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert text_of(f"{site.url}volumes", "[data-volume=batch] [data-total]").split()[0] == "981,230"


class Config:
    """What the process takes of the server's configuration."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = api.data_dir(folder)
        self.ca_dir = self.data_dir / "ca"
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self.database = DatabaseConfig()
        self.api = ApiConfig(listen="127.0.0.1:0")
        self.cluster = None
        self.notify = NotifyConfig()


def test_the_process_over_a_real_mailbox(tmp_path: Path) -> None:
    config, stop, status = Config(tmp_path), Stop(), []
    create_segment(config.runtime_dir / "app.mbx", app_layout())
    services = attach(config.runtime_dir / "app.mbx", "services")
    thread = threading.Thread(target=lambda: status.append(run(config, stop)), daemon=True)
    thread.start()
    port_file, local = config.runtime_dir / "api.port", config.data_dir / "api.sock"
    end_s = time.monotonic() + 60
    while not port_file.exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert local.stat().st_mode & 0o777 == 0o600
    headers = {"Authorization": f"Bearer {api.TOKEN}"}
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port_file.read_text().strip()}", headers=headers, timeout=60
        ) as client:
            with closing(Client("", local=local)) as ours:
                assert ours.get("/session") == {"signed_in": False, "login_needed": False}
            services.post("appserver", frame.encode(Kind.SNAPSHOT, api.snapshot()))
            while client.get("/api/v1/live").json()["mode"] is None:
                assert time.monotonic() < end_s
            answers: list[httpx.Response] = []
            change = lambda: answers.append(client.put("/api/v1/mode", json={"mode": "observe"}))  # noqa: E731
            changing = threading.Thread(target=change, daemon=True)
            changing.start()
            assert services.wait(60)
            asked = frame.decode(services.take()[0].payload).header
            assert (asked["op"], asked["body"]) == ("mode", {"mode": "observe"})
            reply = {"req": asked["req"], "ok": True, "code": 200, "body": {"mode": "observe"}}
            services.post("appserver", frame.encode(Kind.RESPONSE, reply))
            changing.join(60)
            assert answers[0].json() == {"mode": "observe"}
            volumes = client.get("/api/v1/volumes")
            assert volumes.status_code == 503, "there is no database yet"
            told = client.get("/api/v1/health")
            assert (told.status_code, told.json()["status"]) == (503, "down")
    finally:
        stop.set()
        thread.join(60)
        services.close()
    assert status == [0]
    assert not port_file.exists()
    assert not local.exists()


def test_an_address_in_use_is_a_configuration_error(site: Site) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        open_listener(f"127.0.0.1:{site.server.port}")
