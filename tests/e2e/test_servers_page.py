"""The page of one of several servers: who acts and who stands by, and the way to the others' pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from pmdaemon.runtime.clock import boot_ns
from sla_server.api.acting import ActingServer
from sla_server.lease_file import LeaseState
from sla_server.nodes_file import RunningNode, write_nodes
from tests.support import api
from tests.support.browser import Page, console_errors, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e
PAGE = "http://sla-2.example.org:8411"


class Several(Site):
    """Server n1, which stands by: n2 acts, n3 is a node without a server, or away."""

    def __init__(self, tmp_path: Path) -> None:
        self.runtime = tmp_path
        super().__init__(
            api.data_dir(tmp_path), None, nodes=("n1", "n2", "n3"), acting=ActingServer(tmp_path)
        )
        self.hear("n2", n3_runs=True)

    def hear(self, acting: str, *, n3_runs: bool, heard_s: int = 0) -> None:
        nodes = [
            RunningNode("n1", "hall-a", "2.15.1", "0.2.0", takes_over=True, page="http://127.0.0.1:1"),
            RunningNode("n2", "hall-b", "2.15.1", "0.1.0", takes_over=True, page=PAGE),
            RunningNode("n3", "hall-c", "2.15.1", "0.2.0"),
        ]
        write_nodes(self.runtime, nodes if n3_runs else nodes[:2], time.time_ns() // 1000)
        heard_ns = boot_ns() - heard_s * 10**9
        LeaseState("n1", acting, 7, 0, 6.0, heard_ns, PAGE).write(self.runtime)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Several]:
    made = Several(tmp_path)
    yield made
    made.close()
    made.mailbox.close()


def _text(driver: Chrome, css: str) -> str:
    return " ".join(driver.find_element(By.CSS_SELECTOR, css).text.split())


def test_who_acts_who_stands_by_and_what_is_away(site: Several, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}servers")
        wait_for(driver, "[data-server=n3]")
        site.hear("n2", n3_runs=True)
        until(driver, lambda: "The server of n2 acts since" in _text(driver, "#acting"), "who acts")
        assert "n1 stands by" in _text(driver, "#acting")
        for name, parts in {
            "n1": ("stands by", "this page", "0.2.0", "this one"),
            "n2": ("acts", "hall-b", "0.1.0", "heard of", PAGE),
            "n3": ("runs", "hall-c"),
        }.items():
            said = _text(driver, f"[data-server={name}]")
            for part in parts:
                assert part in said, (name, said)
        link = driver.find_element(By.CSS_SELECTOR, "[data-server=n2] a")
        assert link.get_attribute("href") == f"{PAGE}/servers"
        site.hear("n2", n3_runs=False)
        until(driver, lambda: "n3 does not answer" in _text(driver, "#acting"), "that n3 is away")
        site.hear("n2", n3_runs=False, heard_s=60)
        until(driver, lambda: "No server is known to act" in _text(driver, "#acting"), "that news are old")
        assert [each for each in console_errors(driver) if "/health" not in each] == []  # 503: it stands by


def test_the_banner_leads_to_the_page_of_the_server_that_acts(site: Several, page: Page) -> None:
    with page() as driver:
        for view in ("agreements?state=violated", "servers", ""):
            site.hear("n2", n3_runs=True)
            driver.get(f"{site.url}{view}")
            until(
                driver,
                lambda: "the server of node n2 acts" in _text(driver, "#banner").replace("The", "the"),
                view,
            )
            link = driver.find_element(By.CSS_SELECTOR, "#banner a")
            assert link.text == "Page of the server that acts"
            assert link.get_attribute("href") == f"{PAGE}/{view}"


def test_a_page_whose_server_has_died_leads_to_the_others(site: Several, page: Page) -> None:
    with page() as driver:
        driver.get(f"{site.url}agreements")
        until(driver, lambda: driver.find_elements(By.CSS_SELECTOR, "#banner a"), "that it stands by")
        site.stop.set()
        for thread in site.threads:
            thread.join(60)
        site.server.listener.close()
        until(driver, lambda: "Connection to the server lost" in _text(driver, "#banner"), "that it is away")
        links = driver.find_elements(By.CSS_SELECTOR, "#banner a")
        assert [(each.text, each.get_attribute("href")) for each in links] == [
            ("Page of n2", f"{PAGE}/agreements")
        ]
