"""Sign-in through a provider in a real browser: the provider is another site, the session's cookie Strict."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from tests.support import api, oidc
from tests.support.browser import Page, console_errors, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e


def test_a_browser_goes_to_the_provider_and_comes_back_signed_in(tmp_path: Path, page: Page) -> None:
    with oidc.running(tmp_path) as provider, page() as driver:
        provider.people["7f3a"] = {"preferred_username": "bea", "groups": ["storage"]}
        provider.at_the_browser, provider.shows_page = "7f3a", True
        site = Site(api.data_dir(tmp_path), reading="login", oidc=provider.settings())
        site.mailbox.stored = site.source.access.stored
        try:
            provider.redirect_url = f"{site.url}login/oidc/callback"
            driver.execute_cdp_cmd("Security.enable", {})
            driver.execute_cdp_cmd("Security.setIgnoreCertificateErrors", {"ignore": True})
            driver.get(site.url)
            for step in ("provider", "agree"):
                wait_for(driver, f"#{step}")
                driver.find_element(By.ID, step).click()
            wait_for(driver, "[data-sla='erp-gold/latency'] .spark path")
            assert driver.current_url == site.url
            said = driver.find_element(By.ID, "session")
            until(driver, lambda: "bea (operator)" in said.text, "the page knows who it is")
            assert [line for line in console_errors(driver) if site.url in line] == []
        finally:
            site.close()
            site.mailbox.close()
