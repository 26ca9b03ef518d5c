"""The pages of reports in a real browser: from the list to one, on a phone, on A4, within the policy."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.support.browser import Page, console_errors, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e


def overflow(driver: Chrome) -> int:
    """Pixels by which the page is wider than the window."""
    return int(driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth"))


def keep(driver: Chrome, name: str) -> None:
    if folder := os.environ.get("SLA_SCREENSHOTS"):
        driver.save_screenshot(str(Path(folder) / name))


def test_from_the_list_to_a_report_and_onto_paper(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}reports")
        keep(driver, "reports.png")
        driver.find_element(By.LINK_TEXT, "erp-gold-2026-12").click()
        title = "SLA report: erp-gold, 2026-12"  # the list has a title, too
        until(driver, lambda: driver.find_element(By.TAG_NAME, "h1").text == title, "the report")
        assert driver.find_element(By.CSS_SELECTOR, ".state").text == "Not kept"
        style = "return getComputedStyle(document.querySelector('.tile')).borderTopWidth"
        assert driver.execute_script(style) == "1px", "the policy lets the page's own style in"
        assert len(driver.find_elements(By.CSS_SELECTOR, "svg title")) == 31
        keep(driver, "report.png")
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True}
        printed = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", paper)["data"])
        assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 4
        assert console_errors(driver) == []


def test_on_a_phone_nothing_is_cut_off(site: Site, page: Page) -> None:
    with page(390, 844) as driver:
        for path in ("reports", "reports/erp-gold-2026-12"):
            driver.get(f"{site.url}{path}")
            wait_for(driver, "h1")
            assert overflow(driver) == 0, path
            cut = "e => e.scrollWidth > e.clientWidth"
            wider = f"return [...document.querySelectorAll('.wide')].filter({cut}).length"
            assert driver.execute_script(wider) == 0, path
        keep(driver, "report-phone.png")
        assert console_errors(driver) == []
