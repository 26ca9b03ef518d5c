"""The view of one agreement in a real browser: its periods, its violations, what was done for it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from sla_server.agreements.periods import period_bounds
from tests.support import api
from tests.support.axe import violations
from tests.support.browser import Page, until, wait_for
from tests.support.site import Site
from tests.support.world import MONTH

pytestmark = pytest.mark.e2e


def text(driver: Chrome, css: str = "main") -> str:
    return " ".join(driver.find_element(By.CSS_SELECTOR, css).text.split())


def test_a_month_that_was_agreed_has_the_agreement_s_own_days(site: Site, page: Page) -> None:
    """Of a month in Berlin a browser in UTC must not say that it began on the last day of the one before."""
    with page() as driver:
        driver.get(f"{site.url}agreements/erp-gold")
        wait_for(driver, "#heat .b2 button")
        figures = text(driver, "#figures")
        assert re.search(r"Period 1 \w+ \d{4} to (28|29|30|31) \w+ \d{4}, Europe/Berlin", figures), figures
        compliance = re.search(r"Compliance ([\d.]+ %)", figures)
        assert compliance, figures
        assert compliance[1] in text(driver, "#periods tbody tr"), "what screenshots show agrees with itself"
        links = [link.text for link in driver.find_elements(By.CSS_SELECTOR, "#periods td a")]
        assert links
        assert all(words.startswith("1 ") for words in links), links
        assert text(driver, "#heat-zone") == "· Hours are of UTC; the period is of Europe/Berlin."


def test_a_past_period_has_its_own_figures_and_a_broken_address_breaks_nothing(
    site: Site, page: Page
) -> None:
    past_us = time.time_ns() // 1000 - 60 * 86_400_000_000
    with page() as driver:
        driver.get(f"{site.url}agreements/erp-gold#why/sla/%")
        until(driver, lambda: "Error budget left" in text(driver, "#figures"), "the view is there")
        until(driver, lambda: text(driver, "#feed") == "live", "and the rest of the page")
        driver.get("about:blank")
        driver.get(f"{site.url}agreements/erp-gold#why/sla/erp-gold/latency/9e30")
        until(driver, lambda: text(driver, "#feed") == "live", "also with a time that no clock shows")
        site.source.__dict__["slice_hours"] = lambda _name, _objective, from_us, _to_us: [
            {**api.slice_sum("bad", 60), "hour_us": from_us, "newest_us": from_us}
        ]
        driver.get(f"{site.url}agreements/erp-gold?at={past_us}")
        until(driver, lambda: "0 good, 60 bad" in text(driver, "#figures"), "slices of that period")
        assert "0.000 %" in text(driver, "#figures")


def test_a_step_and_the_caps_that_it_set_are_one_row(site: Site, page: Page) -> None:
    """They were two rows with one text below each other."""
    with page() as driver:
        driver.get(f"{site.url}agreements/erp-gold")
        wait_for(driver, "#decisions li p")
        (done,) = driver.find_elements(By.CSS_SELECTOR, "#decisions li")
        assert "disk-0: slowed neighbours down; batch held to 290 weighted IOPS" in done.text
        assert done.text.count("15.1 ms") == 1
        driver.get(f"{site.url}volumes/batch")
        wait_for(driver, "#decisions li p")
        (done,) = driver.find_elements(By.CSS_SELECTOR, "#decisions li")
        assert "batch held to 290 weighted IOPS" in done.text, "where steps are not asked for"


def test_violations_are_those_of_the_objective_and_the_period_that_are_shown(site: Site, page: Page) -> None:
    """Those of another objective had no name of their own, and those of now stood below a past period."""

    def asked() -> tuple[Any, ...]:
        """(objective, before, since_us) of the violations that were asked for last."""
        return tuple([each for each in list(site.source.asked) if each[0] == "episodes"][-1][4:])

    past_us = time.time_ns() // 1000 - 60 * 86_400_000_000
    begun_us, ended_us = period_bounds(MONTH, past_us)
    rows = [{**api.EPISODE, "episode_id": f"e{n}", "cursor": f"{n}:e{n}"} for n in range(35, 10, -1)]
    with page() as driver:
        driver.get(f"{site.url}agreements/erp-gold?objective=latency")
        wait_for(driver, "#episodes tbody tr")
        now_us = time.time_ns() // 1000
        assert asked() == ("latency", None, period_bounds(MONTH, now_us)[0])
        assert text(driver, "#h-decisions").lower() == "what the server did for it, last 7 days"
        driver.get(f"{site.url}agreements/erp-gold?at={past_us}")
        wait_for(driver, "#episodes tbody tr")
        until(driver, lambda: asked() == ("latency", f"{ended_us - 1}:~", begun_us), "of that period")
        done = "what the server did for it, in this period"
        until(driver, lambda: text(driver, "#h-decisions").lower() == done, "what was done, too")
        (_, spans) = [each for each in list(site.source.asked) if each[0] == "decisions"][-1]
        from_us = max(begun_us, ended_us - 31 * 86_400_000_000)  # an October has an hour more
        assert (spans["from_us"], spans["until_us"]) == (from_us, ended_us)
        assert driver.find_elements(By.CSS_SELECTOR, "#episodes-pager a") == []
        site.source.__dict__["episodes"] = lambda _open, limit, **asked: [
            row for row in rows if not asked["before"] or row["cursor"] < asked["before"]
        ][:limit]
        driver.get(f"{site.url}agreements/erp-gold")
        wait_for(driver, "[data-episode=e35]")
        assert len(driver.find_elements(By.CSS_SELECTOR, "#episodes tbody tr")) == 20
        driver.find_element(By.LINK_TEXT, "Older violations").send_keys(Keys.ENTER)
        wait_for(driver, "[data-episode=e15]")
        assert "before=16%3Ae16" in driver.current_url, "the page is in the address"
        assert violations(driver) == []
        driver.find_element(By.LINK_TEXT, "Newest violations").send_keys(Keys.ENTER)
        wait_for(driver, "[data-episode=e35]")
