"""The view of events in a real browser: filters, acknowledging, recipients, silences, at three widths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from sla_server.events.delivery_state import write_delivery_state
from tests.support.axe import violations
from tests.support.browser import Page, console_errors, settle, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e
WIDTHS_PX = (390, 1024, 1440)
WAITING = {"event_id": "e0003", "recipient": "mail", "attempt": 4, "reason": "HTTP 503"}
FAILING = {"name": "mail", "state": "failing", "waiting": 3, "dead_letters": 1, "last_answer": "HTTP 503"}


@pytest.fixture
def site(site: Site, tmp_path: Path) -> Site:
    folder = tmp_path / "metrics"
    folder.mkdir()
    site.server.context.metrics.folder = folder
    write_delivery_state(folder, [FAILING], [WAITING])
    later = 1 << 33  # the test does not run until then: the file counts as fresh all the time
    os.utime(folder / "delivery.json", (later, later))
    return site


def text(driver: Chrome, css: str) -> str:
    return str(driver.find_element(By.CSS_SELECTOR, css).text)


def sign_in(driver: Chrome, site: Site) -> None:
    driver.get(f"{site.url}login?code={site.server.context.logins.issue()}")
    driver.find_element(By.ID, "sign-in").click()
    wait_for(driver, "[data-throttle]")
    driver.get(f"{site.url}events")
    wait_for(driver, "[data-event=e0003] button", visible=True)


@pytest.mark.parametrize("width", WIDTHS_PX)
def test_inbox_recipients_and_silences_are_within_the_width(site: Site, width: int, page: Page) -> None:
    with page(width, 900) as driver:
        driver.get(f"{site.url}events")
        wait_for(driver, "[data-event=e0003]")
        settle(driver)
        assert "not confirmed by mail, 4 tries: HTTP 503" in text(driver, "[data-event=e0003]")
        assert "✓ ann" in text(driver, "[data-event=e0001]")
        assert "disk ordered" in text(driver, "[data-event=e0001]")
        recipient = text(driver, "[data-recipient=mail]")
        assert "failing" in recipient
        assert "HTTP 503" in recipient
        assert "holds back every event" in text(driver, "[data-silence=now]")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        for css in ("#inbox-list button", "#silences button", "#recipients button", "#silence-open"):
            assert not any(each.is_displayed() for each in driver.find_elements(By.CSS_SELECTOR, css)), css
        assert [line for line in console_errors(driver) if "plotly" not in line] == []
        if folder := os.environ.get("SLA_SCREENSHOTS"):
            height = driver.execute_script("return document.documentElement.scrollHeight")
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            driver.save_screenshot(f"{folder}/inbox-{width}.png")


def test_filters_are_asked_of_the_server(site: Site, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}events")
        wait_for(driver, "[data-event=e0003]")
        first = next(asked for asked in site.source.asked if asked[0] == "inbox")
        assert (first[3]["severities"], first[3]["only_open"]) == (["warning", "critical"], True)
        Select(driver.find_element(By.CSS_SELECTOR, "#inbox-filter select")).select_by_value("all")
        driver.find_element(By.CSS_SELECTOR, "#inbox-filter [name=open]").click()
        driver.find_element(By.CSS_SELECTOR, "#inbox-filter [name=subject]").send_keys("batch", Keys.ENTER)
        wanted = {"severities": [], "kind": "", "elements": [], "subject": "batch", "only_open": False}
        until(
            driver,
            lambda: any(asked[0] == "inbox" and asked[3] == wanted for asked in list(site.source.asked)),
            "the filter was asked for",
        )
        wait_for(driver, "[data-event=e0002]")
        assert driver.current_url == f"{site.url}events?severity=all&subject=batch&open=0"
        driver.back()
        until(driver, lambda: "subject" not in driver.current_url, "back is the filter before")
        wait_for(driver, "[data-event=e0003]")
        driver.find_element(By.CSS_SELECTOR, "#inbox-filter [name=kind]").send_keys(
            "gateway-lots", Keys.ENTER
        )
        until(
            driver,
            lambda: (
                "no event is of kind" in text(driver, "#inbox-list")
                and "gateway-lost" in text(driver, "#inbox-list")
            ),
            "the refusal with what resembles it, and not the events of before",
        )


def changes(site: Site) -> list[tuple[str, dict[str, Any]]]:
    """What was asked for, without what forms ask while they are filled in."""
    asked = [(header["op"], header["body"]) for header in list(site.mailbox.posted)]
    return [(op, body) for op, body in asked if not body.get("dry_run")]


def confirm(driver: Chrome, css: str, words: str) -> None:
    """Press a button that acts: nothing is asked of the server before a person has said yes."""
    for decision in ("[value=cancel]", "[type=submit]"):
        driver.find_element(By.CSS_SELECTOR, css).send_keys(Keys.ENTER)
        wait_for(driver, "#ask-dialog[open]")
        until(driver, lambda: words in text(driver, "#ask-dialog .consequence"), f"it says {words!r}")
        focused = driver.switch_to.active_element
        assert focused.get_attribute("value") == "cancel", "Enter alone does nothing"
        assert violations(driver) == []
        driver.find_element(By.CSS_SELECTOR, f"#ask-dialog {decision}").send_keys(Keys.ENTER)
        if decision == "[value=cancel]":
            until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "dialog[open]"), "closed")


def test_acknowledging_silencing_and_trying(site: Site, page: Page) -> None:
    with page() as driver:
        sign_in(driver, site)
        assert not driver.find_element(By.CSS_SELECTOR, "[data-event=e0001] button").is_displayed()
        driver.find_element(By.CSS_SELECTOR, "[data-event=e0003] button").send_keys(Keys.ENTER)
        wait_for(driver, "#note-dialog[open]")
        driver.find_element(By.NAME, "note").send_keys("disk ordered", Keys.ENTER)
        until(driver, lambda: len(changes(site)) == 1, "the acknowledgement was asked for")
        until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "#note-dialog[open]"), "closed")
        driver.find_element(By.ID, "silence-open").send_keys(Keys.ENTER)
        wait_for(driver, "#silence-dialog[open]")
        driver.find_element(By.CSS_SELECTOR, "#silence-form [name=agreement]").send_keys("erp-gold")
        driver.find_element(By.CSS_SELECTOR, "#silence-form [name=reason]").send_keys("move", Keys.ENTER)
        until(driver, lambda: len(changes(site)) == 2, "the silence was asked for")
        until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "#silence-dialog[open]"), "closed")
        confirm(driver, "[data-silence=now] button", "What it held back is sent now")
        until(driver, lambda: len(changes(site)) == 3, "its end was asked for")
        until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "dialog[open]"), "closed")
        confirm(driver, "[data-recipient=mail] button", "A test event goes to mail")
        until(driver, lambda: len(changes(site)) == 4, "the test was asked for")
    asked = changes(site)
    assert asked[0][0] == "acknowledge"
    assert (asked[0][1]["event_id"], asked[0][1]["note"]) == ("e0003", "disk ordered")
    document = YAML(typ="safe", pure=True).load(asked[1][1]["documents"])
    assert (asked[1][0], document["kind"], document["spec"]["duration"]) == ("apply", "Silence", "1h")
    assert document["spec"]["match"] == {"severities": ["info", "warning"], "agreements": ["erp-gold"]}
    assert asked[2:] == [
        ("end_document", {"kind": "Silence", "name": "now"}),
        ("notify_test", {"name": "mail"}),
    ]
