"""Pools on the page, in a real browser over the API tests' rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from tests.support.axe import violations
from tests.support.browser import Page, console_errors, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e


def test_a_pool_has_a_bar_and_shows_its_trend_and_band(site: Site, tmp_path: Path, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}pools")
        wait_for(driver, "#pools .link")
        said = " ".join(driver.find_element(By.ID, "pools-section").text.split())
        for part in ("gateway-a/data", "filling up", "81.0 %", "of 100.0 GiB", "may grow to 65.0 GiB"):
            assert part in said
        bar = driver.find_element(By.CSS_SELECTOR, "#pools meter")
        assert float(bar.get_property("value")) == pytest.approx(0.81)
        driver.find_element(By.CSS_SELECTOR, "#pools .link").click()
        wait_for(driver, "#pool-plot .band")
        assert driver.current_url == f"{site.url}pools?pool=gateway-a%2Fdata"
        title = driver.find_element(By.ID, "pool-title").text
        assert "use by day (line) below its size (dashed), 10 days" in title
        assert "expected to be full on" in title
        paths = driver.find_elements(By.CSS_SELECTOR, "#pool-plot path")
        assert len(paths) == 4, "size, band, forecast, use"
        wait_for(driver, "#pool-volumes a[href='/volumes/erp-db']")
        assert "neither served nor open for 9 d" in driver.find_element(By.ID, "pool-volumes").text
        assert "archive, dry-run: archive --old" in driver.find_element(By.ID, "pool-actions").text
        driver.find_element(By.LINK_TEXT, "Expected to be full").click()
        until(driver, lambda: "sort=soonest" in driver.current_url, "the order is in the address")
        assert "pool=gateway-a%2Fdata" in driver.current_url, "and so is what is shown"
        Select(driver.find_element(By.NAME, "level")).select_by_value("critical")
        wait_for(driver, "#pools .empty a")
        assert violations(driver) == []
        if folder := os.environ.get("SLA_SCREENSHOTS"):
            driver.save_screenshot(str(Path(folder) / "pools.png"))
        assert console_errors(driver) == []


def test_without_pools_it_says_how_to_name_one(
    site: Site, monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    monkeypatch.setattr(site.source, "pools", list)
    with page() as driver:
        driver.get(f"{site.url}pools")
        wait_for(driver, "#pools .empty")
        assert "[[space.source]]" in driver.find_element(By.ID, "pools").text
