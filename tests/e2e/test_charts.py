"""Charts of the page in a real browser: what they draw, and that one can zoom in and stays there."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from sla_server.db.queries.backend_load import BackendLoad
from tests.support import api
from tests.support.axe import violations
from tests.support.browser import Page, console_errors, shape, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e
TRACES = """const node = document.getElementById(arguments[0]);
  return node._fullLayout ? node.data.map((each) => ({name: each.name, kind: each.type, y: [...each.y],
    shape: each.line?.shape})) : []"""
RANGE = """return (document.getElementById(arguments[0])._fullLayout?.xaxis.range || [])
  .map((each) => new Date(String(each).replace(' ', 'T')).getTime())"""


def text(driver: Chrome, css: str) -> str:
    return " ".join(driver.find_element(By.CSS_SELECTOR, css).text.split())


def traces(driver: Chrome, plot: str) -> dict[str, dict[str, Any]]:
    """What a chart draws, by name."""
    return {each["name"]: each for each in driver.execute_script(TRACES, plot)}


def test_a_backends_load_is_drawn_by_volume_against_what_it_can_take(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}backends/disk-0?range=1d")
        wait_for(driver, "#load-plot .main-svg")
        until(
            driver, lambda: "load, live" in traces(driver, "load-plot"), "what is measured now is drawn, too"
        )
        drawn = traces(driver, "load-plot")
        assert list(drawn) == ["batch", "erp-db", "can take", "held to", "load, live"]
        assert [drawn[name]["kind"] for name in ("batch", "erp-db")] == ["bar", "bar"]
        assert drawn["batch"]["y"][-1] == 200 + 8 * 59
        assert set(drawn["can take"]["y"]) == {700}, "the capacity that the policy job found"
        assert drawn["held to"]["y"] == [None, 290, 290], "nobody before the first step, then, and now"
        assert drawn["held to"]["shape"] == "hv"
        assert set(drawn["load, live"]["y"]) == {371}
        assert "can take while erp-gold/latency is kept" in text(driver, "#load-title")
        row = text(driver, "[data-share=batch]")
        assert row == "batch 436 weighted IOPS 84 % 62 % 672 weighted IOPS", "the same in figures"
        count = len(drawn["load, live"]["y"])
        until(
            driver,
            lambda: len(traces(driver, "load-plot")["load, live"]["y"]) > count,
            "it goes on by itself",
        )
        driver.find_element(By.LINK_TEXT, "Earlier").send_keys(Keys.ENTER)
        until(driver, lambda: "load, live" not in traces(driver, "load-plot"), "the past has nothing live")
        until(
            driver, lambda: set(traces(driver, "load-plot")["held to"]["y"]) == {None}, "nobody was held then"
        )
        asked = [each for each in list(site.source.asked) if each[0] == "backend_load"][-1]
        end_us = int(driver.current_url.partition("until=")[2])
        assert asked == ("backend_load", "disk-0", end_us - 86_400_000_000, end_us)
        assert violations(driver) == []
        assert console_errors(driver) == []


def test_a_backend_of_which_nothing_is_stored_says_so(site: Site, page: Page) -> None:
    site.source.__dict__["of_backend"] = lambda *_asked: BackendLoad([], [])
    site.snapshot = lambda at_us: api.snapshot(at_us, backends=[])
    with page() as driver:
        driver.get(f"{site.url}backends/disk-0")
        until(driver, lambda: "Nothing is stored of this time" in text(driver, "#load-note"), "in words")
        assert not driver.find_element(By.ID, "load-plot").is_displayed()
        assert not driver.find_element(By.ID, "shares").is_displayed()


def test_a_backend_with_too_many_clients_says_that_it_shows_some_hours(site: Site, page: Page) -> None:
    few = api.FakeSource().of_backend("disk-0", api.NOW_US - 60_000_000, api.NOW_US, api.NOW_US)
    site.source.__dict__["of_backend"] = lambda *_asked: BackendLoad(few.items, few.volumes, 40, 12)
    with page() as driver:
        driver.get(f"{site.url}backends/disk-0")
        until(driver, lambda: "of 12 hours one was read" in text(driver, "#load-note"), "which are shown")
        until(driver, lambda: "40 other volumes" in traces(driver, "load-plot"), "and of whom the rest is")


def span_ms(driver: Chrome, plot: str) -> float:
    first, last = driver.execute_script(RANGE, plot)
    return float(last - first)


def drag(driver: Chrome, plot: str, share: float) -> None:
    """From the middle of a chart over so much of its width."""
    area = driver.find_element(By.CSS_SELECTOR, f"#{plot} .nsewdrag")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    width = area.rect["width"]
    moves = ActionChains(driver).move_to_element(area).click_and_hold()
    moves.move_by_offset(int(width * share / 2), 0).move_by_offset(
        int(width * share / 2), 0
    ).release().perform()


def shows_all_by_double_click(driver: Chrome, plot: str, all_ms: int) -> bool:
    """Clicks again at each try: a page that is slow may see the two clicks too far apart to be one."""
    if abs(span_ms(driver, plot) - all_ms) < 1_000:
        return True
    area = driver.find_element(By.CSS_SELECTOR, f"#{plot} .nsewdrag")
    ActionChains(driver).double_click(area).perform()
    return False


@pytest.mark.parametrize(
    ("view", "plot"),
    [("volumes/batch", "latency-plot"), ("volumes/batch", "load-plot"), ("backends/disk-0", "load-plot")],
)
def test_one_can_zoom_into_a_chart_and_stays_there_until_all_is_asked_for(
    site: Site, page: Page, view: str, plot: str
) -> None:
    hour_ms = 3_600_000
    with page() as driver:
        driver.get(f"{site.url}{view}?range=1h")
        wait_for(driver, f"#{plot} .main-svg")
        until(driver, lambda: abs(span_ms(driver, plot) - hour_ms) < 1_000, "the whole hour")
        drag(driver, plot, 0.25)
        until(driver, lambda: span_ms(driver, plot) < hour_ms * 0.3, "a quarter of it")
        zoomed = driver.execute_script(RANGE, plot)
        colour = f"return document.getElementById('{plot}')._fullLayout.font.color"
        before = driver.execute_script(colour)
        shape(driver, 1280, 1000, dark=True)  # which draws it again, as new data do
        until(driver, lambda: driver.execute_script(colour) != before, "drawn again")
        assert driver.execute_script(RANGE, plot) == zoomed, "also while a live range moves on"
        until(driver, lambda: shows_all_by_double_click(driver, plot, hour_ms), "all after a double click")
        drag(driver, plot, 0.25)
        until(driver, lambda: span_ms(driver, plot) < hour_ms * 0.3, "once more")
        driver.find_element(By.LINK_TEXT, "7 days").send_keys(Keys.ENTER)
        until(driver, lambda: span_ms(driver, plot) > 167 * hour_ms, "another range is shown whole")
        assert console_errors(driver) == []
