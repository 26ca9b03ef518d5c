"""Every view of the page in a real browser: within its width, without complaint, its state in its address."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from dashboard.views import VIEWS
from sla_server.db.queries.backend_load import BackendLoad
from tests.support import api
from tests.support.axe import violations
from tests.support.browser import Page, console_errors, reshape, shape, take_session, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e
THINGS = {"agreement": "erp-gold", "volume": "batch", "backend": "disk-0", "policy": "3"}
READY = {
    "overview": "[data-sla='erp-gold/latency'] .spark path",
    "agreements": "[data-promise='erp-gold/latency'] meter",
    "agreement": "#heat .b2 button",
    "apply": "#not-here a",
    "volumes": "[data-volume=erp-db] [data-total]",
    "volume": "[data-neighbour=erp-db]",
    "backends": "[data-backend=disk-0]",
    "backend": "[data-use=erp-db]",
    "gateways": "[data-gateway=g-1]",
    "pools": "#pools meter",
    "policies": "[data-harm]",
    "policy": "[data-cap=batch]",
    "events": "[data-event=e0003]",
    "approvals": "[data-approval='5c0f']",
    "jobs": "[data-job=j-1]",
    "servers": "#servers .empty",
    "audit": "[data-entry=a-1]",
    "users": "#users .empty",
}
"""What a view shows once it has its data."""
SAYS = {
    "agreement": ("erp-gold", "storage-team to acme", "p95 of latency at most 12.0 ms up to 150 IOPS"),
    "volume": ("batch is throttled to", "on disk-0", "held to 290 weighted IOPS"),
    "backend": ("371 weighted IOPS", "largest load at which the promise was kept"),
    "backends": ("53 %", "700 weighted IOPS"),
    "policies": ("Version 3", "70 % of the harm", "likely cause", "Only 12 intervals, 30 needed."),
    "policy": ("not tried on stored I/O", "40 of 168"),
    "gateways": ("13.7 %", "gateway-a"),
    "approvals": ("mode enforce on the server (now observe)", "zoe"),
    "jobs": ("it helps", "version 3"),
    "servers": ("This server is alone", "docs/operations/cluster.md"),
    "audit": ("token", "changed the mode"),
    "users": ("Accounts", "sign in"),
}
"""Words that a view must have."""
CHANGING = {
    "apply": ("apply?name=erp-gold", "#admit:not(:empty)"),
    "approvals": ("approvals", "[data-approval] button"),
    "users": ("users", "[data-user=ann]"),
}
"""Views of which there is little to see without a session: address, and what is shown then."""
FOLDER = os.environ.get("SLA_SCREENSHOTS", "")
"""Where pictures go: ``make screenshots``."""
MOST_PIXELS = 16_383
"""Height of a picture that the format can hold: of a higher one the browser gives nothing."""
LOOKS = [(390, True), *([(390, False), (1280, True)] if FOLDER else [(2560, True)]), (1280, False)]
"""Width, and whether it is dark; a view is loaded as the first."""
DRAWN = """return [...document.querySelectorAll('.plot, #plot')].every((each) =>
  !each.offsetParent || each.querySelector('.main-svg'))"""

LEGENDS = """return [...document.querySelectorAll('.plot')].every((each) => {
  const legend = each.querySelector('.legend');
  if (!legend || !each.offsetParent) return true;
  const bottom = legend.getBoundingClientRect().bottom - each.getBoundingClientRect().top;
  return bottom <= each._fullLayout._size.t + 1;
})"""
"""A chart that was made wider has its legend above it again once its view has drawn it again."""


def text(driver: Chrome, css: str = "main") -> str:
    return " ".join(driver.find_element(By.CSS_SELECTOR, css).text.split())


def says(driver: Chrome, css: str, wanted: str) -> None:
    """Wait until an element has this text: parts of a view come with answers of their own."""
    until(driver, lambda: text(driver, css) == wanted, f"{css} says {wanted!r}")


def number_of(driver: Chrome, css: str) -> int:
    return len(driver.find_elements(By.CSS_SELECTOR, css))


def path_of(key: str) -> str:
    path = next(view.path for view in VIEWS if view.key == key)
    return path.replace("<name>", THINGS.get(key, ""))[1:]


def test_each_view_is_within_its_width_and_says_what_it_should(site: Site, page: Page) -> None:
    """Each is loaded as a phone has it, and shown as wider pages have it."""
    checked = {"applied": [{"name": "erp-gold", "version": 2, "changed": False}], "warnings": []}
    site.mailbox.answer = lambda _header: (True, 200, checked)
    own = [view for view in VIEWS if not view.elsewhere]
    assert set(READY) == {view.key for view in own}, "a view that is added is looked at, too"
    found: dict[tuple[str, int], list[str]] = {}

    def looked_at(driver: Chrome, key: str, name: str) -> None:
        for width, dark in LOOKS:
            reshape(driver, width, 900, dark=dark)
            until(driver, lambda: driver.execute_script(DRAWN), "the charts are drawn")
            until(driver, lambda: wide_parts(driver) == [], f"{key}: within {width} pixels")
            if FOLDER:
                until(driver, lambda: driver.execute_script(LEGENDS), f"{key}: no legend on its chart")
                picture(driver, name, width, dark=dark)
            found[key, width] = violations(driver)
        width, dark = LOOKS[0]
        shape(driver, width, 900, dark=dark)

    width, dark = LOOKS[0]
    with page(width, 900, dark=dark) as driver:
        for view in own:
            driver.get(f"{site.url}{path_of(view.key)}")
            wait_for(driver, READY[view.key])
            until(driver, lambda: text(driver, "#feed") == "live", "the shell knows the server")
            for words in SAYS.get(view.key, ()):
                until(driver, lambda words=words: words in text(driver), f"{view.key}: {words}")
            until(driver, lambda: driver.execute_script(DRAWN), "the charts are drawn")
            current = driver.find_elements(By.CSS_SELECTOR, "header nav [aria-current]")
            assert [link.text for link in current] == [
                each.title for each in VIEWS if each.key in (view.key if not view.above else view.above,)
            ]
            looked_at(driver, view.key, view.key)
            assert console_errors(driver) == [], view.key
        for path in ("reports", "reports/erp-gold-2026-12", "login", "runbook"):
            driver.get(f"{site.url}{path}")
            looked_at(driver, path, "report" if "/" in path else path)
        for key, (address, css) in CHANGING.items():
            if key == next(iter(CHANGING)):
                take_session(driver, site.url, site.server.context.logins.issue())
            driver.get(f"{site.url}{address}")
            wait_for(driver, css, visible=True)
            looked_at(driver, f"{key}, signed in", key)
            assert console_errors(driver) == [], key
    assert {key: lines for key, lines in found.items() if lines} == {}, "what axe-core finds"


def wide_parts(driver: Chrome) -> list[str]:
    """Sections of the page that are wider than what shows them."""
    return [
        part.get_attribute("aria-labelledby") or part.get_attribute("aria-label") or ""
        for part in driver.find_elements(By.CSS_SELECTOR, "section")
        if part.get_property("scrollWidth") > part.get_property("clientWidth")
    ]


def picture(driver: Chrome, key: str, width: int, *, dark: bool) -> None:
    """A picture of the whole view, as docs/screenshots has it."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    scale = min(1, MOST_PIXELS / height)
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 70})
    name = f"{key}-{'phone' if width < 1000 else 'wide'}-{'dark' if dark else 'light'}.webp"
    assert taken["data"], f"{name}: no picture of {width} x {height}"
    (Path(FOLDER) / name).write_bytes(base64.b64decode(taken["data"]))
    metrics["height"] = 900
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def test_a_phone_is_told_nothing_of_a_picture_that_it_does_not_get(site: Site, page: Page) -> None:
    with page(390, 844) as driver:
        driver.get(f"{site.url}volumes/batch")
        wait_for(driver, "#graph li")
        assert not driver.find_element(By.CSS_SELECTOR, "#graph svg").is_displayed()
        assert "the wider a line" not in text(driver)
        reshape(driver, 1280, 900, dark=False)
        until(driver, lambda: "the wider a line" in text(driver), "beside the picture")


def test_the_overview_says_why_and_when(site: Site, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the row of a promise what was found of it; below, when who was held back and what was violated."""
    spent = {"budget_remaining": -0.2, "budget_minutes_left": 0.0, "alerts": ["fast"]}
    slas = [{**api.snapshot()["slas"][0], "state": "violating", "latency_us": 15_100, **spent}]
    site.snapshot = lambda at_us: api.snapshot(at_us, slas=slas)
    opened_us = api.NOW_US + site.source.shift_us - 300_000_000
    episode = {**api.EPISODE, "opened_us": opened_us, "closed_us": opened_us + 200_000_000}
    monkeypatch.setattr(site.source, "episodes", lambda *_asked, **_more: [episode])
    with page() as driver:
        driver.get(site.url)
        wait_for(driver, "[data-sla='erp-gold/latency'] .because")
        until(
            driver,
            lambda: "erp-gold/latency is " in text(driver, "[data-sla='erp-gold/latency'] .because"),
            "why, without a click",
        )
        words = "1 violated; 1 has spent the error budget of the period; 1 volume throttled."
        until(driver, lambda: words in text(driver, "#summary"), "what is so now, and of the period")
        assert "The error budget is spent." in text(driver, "[data-sla='erp-gold/latency']")
        wait_for(driver, "#timeline rect.violated")
        wait_for(driver, "#timeline rect.throttled")
        label = "return document.querySelector(arguments[0]).closest('svg').getAttribute('aria-label')"
        assert "violated " in driver.execute_script(label, "rect.violated")
        assert ", 3 min: 3 bad slices, at worst 2.3 times" in driver.execute_script(label, "rect.violated")
        assert "held to 290 weighted IOPS" in driver.execute_script(label, "rect.throttled")
        place = "return Number(document.querySelector(arguments[0]).getAttribute('x'))"
        assert driver.execute_script(place, "rect.violated") < driver.execute_script(place, "rect.throttled")
        driver.find_element(By.LINK_TEXT, "7 days").click()
        until(driver, lambda: driver.current_url.endswith("/?span=7d"), "the range is in the address")
        driver.find_element(By.LINK_TEXT, "Earlier").send_keys(Keys.ENTER)
        until(driver, lambda: "&until=" in driver.current_url, "the end of the range is in the address")
        quiet = "No promise was violated and nobody was held back in this time."
        until(driver, lambda: text(driver, "#timeline-note") == quiet, "a past range")
        began_us = int(driver.current_url.rpartition("=")[2])
        asked = [each[1:] for each in list(site.source.asked) if each[0] == "throttles"]
        assert f"{began_us}:~" in asked[-1], "only what began before its end"
        driver.find_element(By.LINK_TEXT, "Now").send_keys(Keys.ENTER)
        wait_for(driver, "#timeline rect.violated")
        assert violations(driver) == []
        assert console_errors(driver) == []


def test_a_row_is_of_one_time(site: Site, page: Page) -> None:
    """Of now on the overview, of the period among all agreements: no row mixes both."""
    heads = "return [...document.querySelectorAll('main th[scope=col]')].map((each) => each.textContent)"
    now = ["State", "Agreement", "Measured", "Promised", "Course", "What the server does"]
    snapshot = site.snapshot
    assert snapshot is not None

    def spent(at_us: int) -> dict[str, Any]:
        found = snapshot(at_us)
        for row in found["slas"]:
            row |= {"state": "ok", "budget_remaining": 0.4, "alerts": []}
        found["slas"][0] |= {"budget_remaining": -0.1}
        found["slas"][1] |= {"alerts": ["fast"]}
        return found

    site.snapshot = spent
    with page(1440, 900) as driver:
        driver.get(site.url)
        wait_for(driver, "#slas [data-sla]")
        assert driver.execute_script(heads)[: len(now)] == now
        until(
            driver, lambda: "The error budget is spent." in text(driver, "#slas"), "why it is among the first"
        )
        assert "The error budget is being spent much too fast." in text(driver, "#slas")
        assert "%" not in text(driver, "#slas"), "a share is of the period"
        driver.get(f"{site.url}agreements")
        wait_for(driver, "#promises [data-row], #promises tbody tr")
        columns = driver.execute_script(heads)
        assert "Error budget left" in " ".join(columns)
        assert "Measured" not in " ".join(columns)


def test_a_list_has_its_state_in_its_address(site: Site, page: Page) -> None:
    names = [f"s{number:03}" for number in range(300)]
    row = api.snapshot()["slas"][0]
    shown = [{**row, "name": name} for name in names[:20]]
    others = [[name, "latency", "idle", 0.99, 1.0, 0.5] for name in names[20:]]
    shown[19]["state"] = "violating"
    totals = {"slas": {"ok": 19, "violating": 1, "idle": 280}}
    site.snapshot = lambda at_us: api.snapshot(at_us, slas=shown, others=others, totals=totals)
    agreement = site.source._agreement("erp-gold")
    site.source.__dict__["agreements"] = lambda *_: [{**agreement, "name": name} for name in names]
    with page() as driver:
        driver.get(f"{site.url}agreements")
        wait_for(driver, "#promises tbody tr:first-child[data-promise='s019/latency']")
        assert text(driver, "#promises-pager") == "1 to 50 of 300 Next"
        assert text(driver, "#tally") == "280 idle, 19 kept, 1 violated"
        driver.find_element(By.NAME, "match").send_keys("S2", Keys.ENTER)
        until(driver, lambda: "of 100" in text(driver, "#promises-pager"), "those with this in their name")
        assert driver.current_url == f"{site.url}agreements?match=S2"
        driver.find_element(By.CSS_SELECTOR, "#promises-pager [rel=next]").send_keys(Keys.ENTER)
        wait_for(driver, "[data-promise='s299/latency']")
        assert driver.current_url == f"{site.url}agreements?match=S2&offset=50"
        assert "99.00 %" in text(driver, "[data-promise='s299/latency']")
        assert text(driver, "#promises-pager") == "Previous 51 to 100 of 100"
        driver.refresh()
        wait_for(driver, "[data-promise='s299/latency']")
        assert driver.find_element(By.NAME, "match").get_property("value") == "S2"
        driver.back()
        wait_for(driver, "[data-promise='s200/latency']")
        Select(driver.find_element(By.NAME, "state")).select_by_value("violating")
        wait_for(driver, "#promises .empty a")
        assert "state=violating" in driver.current_url
        driver.find_element(By.CSS_SELECTOR, "#promises .empty a").click()
        until(driver, lambda: "of 300" in text(driver, "#promises-pager"), "all of them again")
        driver.find_element(By.LINK_TEXT, "Agreement").click()
        wait_for(driver, "#promises tbody tr:first-child[data-promise='s000/latency']")
        assert driver.current_url == f"{site.url}agreements?sort=name"
        assert driver.find_elements(By.CSS_SELECTOR, "th[aria-sort=ascending]")
        for view in ("audit", "jobs", "policies"):
            driver.get(f"{site.url}{view}?match=nobody")
            wait_for(driver, f"#{view} .empty a")
            driver.find_element(By.CSS_SELECTOR, f"#{view} .empty a").click()
            wait_for(driver, READY[view])
            assert driver.current_url == f"{site.url}{view}"
            driver.find_element(By.CSS_SELECTOR, f"#{view} th a:not([href='/{view}'])").click()
            until(driver, lambda: "?sort=" in driver.current_url, "the order is in the address")
            wait_for(driver, READY[view])
        assert console_errors(driver) == []


def test_a_fleet_of_64_000_promises_is_paged_found_and_counted(site: Site, page: Page) -> None:
    """The page holds 50 of them; the feed has rows of 500, and the states of all others."""
    row, agreement = api.snapshot()["slas"][0], site.source._agreement("erp-gold")
    names = [f"s{number:05}" for number in range(64_000)]
    states = {name: "violating" if name.endswith("999") else "ok" for name in names}
    rows = [{**row, "name": name, "state": states[name]} for name in names[:500]]
    others = [[name, "latency", states[name], 0.99, 1.0, 0.5] for name in names[500:]]
    totals = {"slas": {"ok": 63_936, "violating": 64}}
    site.source.__dict__["agreement_names"] = lambda: dict.fromkeys(names, "gold")
    site.source.__dict__["agreements_named"] = lambda some: [{**agreement, "name": name} for name in some]
    held = [{**api.snapshot()["throttles"][0], "throttle_id": f"t{n}", "volume": f"v{n}"} for n in range(500)]
    backends = [{**api.snapshot()["backends"][0], "backend": f"d{n}"} for n in range(400)]
    more = {"throttles": held, "backends": backends, "totals": {**totals, "throttles": 2_000}}
    site.source.__dict__["episodes"] = lambda *_asked, **_more: [
        {**api.EPISODE, "episode_id": f"e{n}", "closed_us": None, "cursor": f"{n}:e{n}"} for n in range(10)
    ]
    site.snapshot = lambda at_us: api.snapshot(at_us, slas=rows, **more)
    site.server.context.live.put(
        api.snapshot(time.time_ns() // 1000, slas=rows, others=others, totals=totals)
    )
    with page() as driver:
        driver.get(f"{site.url}agreements")
        wait_for(driver, "#promises tbody tr:first-child[data-promise='s00999/latency']")
        says(driver, "#promises-pager", "1 to 50 of 64,000 Next")
        says(driver, "#tally", "63,936 kept, 64 violated")
        until(driver, lambda: number_of(driver, "#promises tbody tr") == 50, "50 of #promises tbody tr")
        driver.get(f"{site.url}agreements?offset=63950&sort=name")
        wait_for(driver, "[data-promise='s63999/latency']")
        says(driver, "#promises-pager", "Previous 63,951 to 64,000 of 64,000")
        driver.get(f"{site.url}agreements?match=s63&state=violating")
        wait_for(driver, "[data-promise='s63999/latency']")
        says(driver, "#promises-pager", "1 in all")
        driver.get(site.url)
        wait_for(driver, "[data-sla]")
        assert number_of(driver, "[data-sla]") < 100, "never a whole table"
        wait_for(driver, "#episodes-more a", visible=True)
        until(driver, lambda: number_of(driver, "[data-throttle]") == 12, "12 of [data-throttle]")
        says(driver, "#throttles-more", "Show 500 of 2,000; sla get throttles lists all")
        until(driver, lambda: "at least 500 volumes throttled" in text(driver, "#summary"), "summary")
        until(driver, lambda: number_of(driver, "#backend-list li") == 12, "12 of #backend-list li")
        says(driver, "#backends-more", "All 400 that need control or do not answer")
        assert violations(driver) == []
        driver.find_element(By.CSS_SELECTOR, "#throttles-more button").send_keys(Keys.ENTER)
        until(driver, lambda: number_of(driver, "[data-throttle]") == 500, "all")
        assert console_errors(driver) == []


CAPS_DRAWN = """const shown = document.getElementById("load-plot").data || [];
const caps = shown.filter((line) => line.name.startsWith("cap"));
return caps.map((line) => [line.name, line.y.filter((value) => value !== null)]);"""


def test_a_cap_of_one_client_is_drawn_as_that_client_s(
    site: Site, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = api.decisions()[0]

    def cap_of(client: str, **rate: float) -> dict[str, Any]:
        figures = {**of_all["figures"], "client": client, "in_force": rate}
        return {**of_all, "decision_id": f"d-{client}", "figures": figures}

    by_hand = {"before": None, "after": {"bytes_per_s": 1e6}}  # of a unit that the chart does not have
    in_bytes = cap_of("host-c", bytes_per_s=1e6)
    in_bytes["figures"] |= by_hand
    rows = [cap_of("host-a", cost_per_s=40.0), of_all, cap_of("host-b", ops_per_s=70.0), in_bytes]
    monkeypatch.setattr(api, "decisions", lambda: rows)
    with page() as driver:
        for query, wanted in (
            ("", {"cap": 290.0, "cap of host-a": 40.0, "cap of host-b": 70.0}),
            ("?client=host-b", {"cap of host-b": 70.0}),
        ):
            driver.get(f"{site.url}volumes/batch{query}")
            wait_for(driver, "#load-plot .main-svg")
            drawn = driver.execute_script(CAPS_DRAWN)
            assert {name: set(values) for name, values in drawn} == {
                name: {rate} for name, rate in wanted.items()
            }


def test_the_views_of_one_thing_lead_to_each_other(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}volumes/batch")
        wait_for(driver, "#ranges [aria-current]")
        wait_for(driver, "#latency-plot .main-svg")
        wait_for(driver, "#load-plot .main-svg")
        wait_for(driver, "#graph svg path")
        busiest, other = driver.find_elements(By.CSS_SELECTOR, "#clients tbody tr")
        assert "127.0.0.1 272 204 read, 68 written 1.1 MB/s 97 % 2.30 ms 9.20 ms" in " ".join(
            busiest.text.split()
        )
        assert other.text.startswith("10.0.0.31"), "the busiest first"
        driver.find_element(By.LINK_TEXT, "127.0.0.1").click()
        until(driver, lambda: asked_client(site) == "127.0.0.1", "the history of one client")
        assert driver.current_url.endswith("?client=127.0.0.1")
        driver.execute_script("scrollTo(0, 0)")
        driver.find_element(By.ID, "all-clients").send_keys(Keys.ENTER)
        until(driver, lambda: asked_client(site) == "", "all of them again")
        driver.execute_script("scrollTo(0, 0)")
        driver.find_element(By.LINK_TEXT, "7 days").click()
        until(driver, lambda: driver.current_url.endswith("?range=7d"), "the range is in the address")
        until(driver, lambda: asked_span_us(site) == 7 * 86_400_000_000, "seven days were asked for")
        driver.back()
        until(driver, lambda: text(driver, "#ranges [aria-current]") == "1 hour", "back is the range before")
        driver.find_element(By.LINK_TEXT, "Earlier").send_keys(Keys.ENTER)
        until(driver, lambda: "?until=" in driver.current_url, "the end of the range is in the address")
        end_us = int(driver.current_url.rpartition("=")[2])
        until(driver, lambda: asked_until_us(site) == end_us, "an hour of the past")
        assert text(driver, "#until-note").startswith("Shown is ")
        assert asked_span_us(site) == 3_600_000_000
        driver.find_element(By.LINK_TEXT, "Later").send_keys(Keys.ENTER)
        until(driver, lambda: asked_until_us(site) > end_us, "half a range later")
        driver.find_element(By.LINK_TEXT, "Now").send_keys(Keys.ENTER)
        until(driver, lambda: driver.current_url == f"{site.url}volumes/batch", "now again")
        driver.find_element(By.LINK_TEXT, "disk-0").click()
        wait_for(driver, "[data-member=erp-db]")
        assert driver.current_url == f"{site.url}backends/disk-0"
        wait_for(driver, "#curve-plot .main-svg")
        drawn = "return document.getElementById('curve-plot').data.map((line) => [line.name, line.x[0]])"
        until(
            driver, lambda: len(driver.execute_script(drawn)) == 5, "points, two fits, what it can take, now"
        )
        assert driver.execute_script(drawn)[3:] == [["what it can take", 700], ["load now", 371]]
        assert "the load is 371 weighted IOPS now" in text(driver, "#curve-title")
        driver.find_element(By.LINK_TEXT, "curve").send_keys(Keys.ENTER)
        until(driver, lambda: driver.current_url.endswith("?curve=erp-gold%2Flatency%2F0"), "its address")
        driver.back()
        driver.find_element(By.CSS_SELECTOR, "#capacity a").click()
        wait_for(driver, "#heat .b2 button")
        assert driver.current_url == f"{site.url}agreements/erp-gold?objective=latency"
        until(driver, lambda: "is kept" in text(driver, "#inline-headline"), "why, without a click")
        until(
            driver, lambda: "0.99 → 0.995" in text(driver, "#versions"), "versions, which are asked for apart"
        )
        driver.find_element(By.CSS_SELECTOR, "#heat .b2 button").send_keys(Keys.ENTER)
        wait_for(driver, "#minutes tbody tr")
        assert "hour=" in driver.current_url
        assert "bad" in text(driver, "#minutes")
        driver.find_element(By.CSS_SELECTOR, "#minutes a.why").click()
        wait_for(driver, "#why-dialog[open]")
        assert driver.find_element(By.ID, "why-at").get_property("value"), "the time of that slice"
        driver.find_element(By.ID, "why-close").click()
        assert "hour=" in driver.current_url, "the address is that of the view again"
        driver.get(f"{site.url}policies/3?volume=batch")
        wait_for(driver, "#heat .b3")
        assert driver.find_element(By.CSS_SELECTOR, "#heat .b3").get_attribute("title") == (
            "Mon 00:00 UTC: at most 300 weighted IOPS, 750 at once after a quiet time, usual demand up to 450"
        )
        width = "return document.getElementById('harms-graph').naturalWidth"
        until(driver, lambda: driver.execute_script(width) > 0, "the graph of who hurt whom is drawn")


def asked_span_us(site: Site) -> int:
    """How long the history was that was asked for last."""
    spans = [asked[3] - asked[2] for asked in list(site.source.asked) if asked[0] == "rollup_history"]
    return int(spans[-1])


def asked_until_us(site: Site) -> int:
    """Until when the history was that was asked for last."""
    return int([asked[3] for asked in list(site.source.asked) if asked[0] == "rollup_history"][-1])


def asked_client(site: Site) -> str:
    """Of which client the history was that was asked for last; empty: of all."""
    asked = [each for each in list(site.source.asked) if each[0] == "rollup_history"][-1]
    return str(asked[4]) if len(asked) > 4 else ""


def test_a_backend_has_ranges_of_the_past_that_its_address_names(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}backends/disk-0?range=1d")
        wait_for(driver, "[data-use=erp-db]")
        assert text(driver, "#ranges [aria-current]") == "24 hours"
        assert not driver.find_element(By.ID, "until-note").is_displayed()
        driver.find_element(By.LINK_TEXT, "Earlier").click()
        quiet = "Nothing in this range: no promise here was at risk."
        until(driver, lambda: text(driver, "#decisions") == quiet, "twelve hours earlier")
        until(driver, lambda: "not acted here in this range" in text(driver, "#use"), "nor is anything else")
        assert "&until=" in driver.current_url
        assert "all else is of now" in text(driver, "#until-note")
        spans = [call[1] for call in list(site.source.asked) if call[0] == "decisions"]
        end_us = int(driver.current_url.partition("until=")[2])
        assert (spans[-1]["until_us"], spans[-1]["from_us"]) == (end_us, end_us - 86_400_000_000)
        assert violations(driver) == []
        assert console_errors(driver) == []
        driver.back()
        wait_for(driver, "[data-use=erp-db]")
        driver.find_element(By.LINK_TEXT, "30 days").click()
        until(driver, lambda: text(driver, "#ranges [aria-current]") == "30 days", "another range")


@pytest.mark.parametrize("view", ["backends/disk-0", "volumes/batch"])
def test_a_browser_whose_clock_is_behind_shows_the_newest_decisions_all_the_same(
    site: Site, page: Page, view: str
) -> None:
    behind = "const now = Date.now; Date.now = () => now() - 3600e3;"
    with page() as driver:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": behind})
        driver.get(f"{site.url}{view}")
        wait_for(driver, "#decisions time")  # 42 s ago


def test_what_is_seen_now_and_not_stored_yet_says_so_in_place_of_its_charts(site: Site, page: Page) -> None:
    site.source.__dict__.update(
        backend_of=lambda _volume: None,
        backends=list,
        rollup_history=lambda *_: [],
        of_backend=lambda *_: BackendLoad([], []),
    )
    with page() as driver:
        for path, note in (("volumes/batch", "#history-note"), ("backends/disk-0", "#load-note")):
            driver.get(f"{site.url}{path}")
            until(driver, lambda note=note: "Nothing is stored of it yet" in text(driver, note), path)
        assert console_errors(driver) == []


def test_what_is_not_there_is_said(site: Site, page: Page) -> None:
    with page() as driver:
        for path in ("agreements/none", "volumes/none", "backends/none", "policies/9"):
            driver.get(f"{site.url}{path}")
            wait_for(driver, "#missing", visible=True)
            assert "no " in text(driver, "#missing")
            assert not driver.find_element(By.ID, "found").is_displayed()
