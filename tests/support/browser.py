"""Headless Chromium for tests: one function a question, each with a browser and profile of its own."""

from __future__ import annotations

import shutil
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import (
    presence_of_element_located,
    visibility_of_element_located,
)
from selenium.webdriver.support.wait import WebDriverWait

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)
WAIT_S = 120.0
Page = Callable[..., AbstractContextManager[Chrome]]
"""Opens a page of a size: ``fresh_page`` in a browser that several tests share."""


@contextmanager
def browser(width: int = 1280, height: int = 1000, *, dark: bool = False) -> Iterator[Chrome]:
    """A fresh browser whose page has this size in CSS pixels (also below Chromium's least window)."""
    with running() as driver:
        shape(driver, width, height, dark=dark)
        yield driver


@contextmanager
def running() -> Iterator[Chrome]:
    """A Chromium with a profile of its own, for one test or, by ``fresh_page``, for several."""
    folder = tempfile.mkdtemp(prefix="sla-browser-")
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for option in (*OPTIONS.split(), f"--user-data-dir={folder}", "--window-size=1280,1000"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fresh_page(
    driver: Chrome, width: int = 1280, height: int = 1000, *, dark: bool = False
) -> Iterator[Chrome]:
    """A new window with a page of this size, without cookies, storage, cache or log of an earlier one."""
    former = driver.current_window_handle
    driver.switch_to.new_window("window")
    try:
        for command in ("Network.clearBrowserCookies", "Network.clearBrowserCache"):
            driver.execute_cdp_cmd(command, {})
        driver.get_log("browser")  # takes what an earlier page has left
        shape(driver, width, height, dark=dark)
        yield driver
    finally:
        origin = driver.execute_script("return location.origin")
        if origin != "null":
            driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        driver.close()
        driver.switch_to.window(former)


def shape(driver: Chrome, width: int, height: int, *, dark: bool) -> None:
    """Give the page a size in CSS pixels and a colour scheme."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def reshape(driver: Chrome, width: int, height: int, *, dark: bool) -> None:
    """Show the page that is open in another size and colour scheme, until it is within that width.

    What only the look changes need not be loaded and filled in again for each look.
    """
    shape(driver, width, height, dark=dark)
    within = f"""return innerWidth === {width} && document.documentElement.scrollWidth <= {width} &&
      !document.getAnimations().some((each) => each instanceof CSSTransition)"""
    until(driver, lambda: driver.execute_script(within), f"the page is within {width} pixels")


def take_session(driver: Chrome, url: str, code: str) -> None:
    """Sign the browser in with a one-time code: the form is sent for it, and the overview is not loaded.

    To draw the overview with its chart takes more processor than most views that a test is about. The form in
    the browser is tested by tests/e2e/test_inbox.py and, with roles, by test_forms.py.
    """
    form = urllib.parse.urlencode({"code": code}).encode()
    opener = urllib.request.build_opener(_AnswerAsItIs)
    with opener.open(f"{url}login", form, timeout=WAIT_S) as answer:
        assert answer.status == 303, "where the overview is"
        (cookie,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
    driver.execute_cdp_cmd(
        "Network.setCookie",
        {"name": cookie.key, "value": cookie.value, "url": url, "httpOnly": True, "sameSite": "Strict"},
    )


class _AnswerAsItIs(urllib.request.HTTPErrorProcessor):
    def http_response(self, request: Any, response: Any) -> Any:
        return response


def wait_for(driver: Chrome, css: str, *, visible: bool = False) -> None:
    """Until the page has such an element; TimeoutException after two minutes."""
    condition = visibility_of_element_located if visible else presence_of_element_located
    WebDriverWait(driver, WAIT_S).until(
        condition((By.CSS_SELECTOR, css)), f"no {css!r} on {driver.current_url}"
    )


def until(driver: Chrome, condition: Callable[[], Any], what: str) -> None:
    """Wait until something is so; what the page replaces before it has been read is looked for again.

    Raises:
        TimeoutException: it is not; ``what`` is said.
    """
    waiting = WebDriverWait(driver, WAIT_S, ignored_exceptions=(StaleElementReferenceException,))
    waiting.until(lambda _driver: condition(), what)


def console_errors(driver: Chrome) -> list[str]:
    """What the browser complained of: script errors, refused content, failed requests."""
    return [
        entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]


def take_screenshot(
    url: str,
    path: Path | str,
    width: int,
    height: int,
    wait_css: str,
    *,
    dark: bool = False,
    whole: bool = False,
) -> None:
    """A PNG of the page at ``url`` once ``wait_css`` is there; ``whole``: as high as the page is."""
    with browser(width, height, dark=dark) as driver:
        driver.get(url)
        wait_for(driver, wait_css)
        settle(driver)
        if whole:
            height = int(driver.execute_script("return document.documentElement.scrollHeight"))
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        Path(path).write_bytes(driver.get_screenshot_as_png())


def settle(driver: Chrome) -> None:
    """Until the chart is drawn, if the page shows one."""
    script = (
        "const c = document.getElementById('chart'); return !c || c.hidden || !!c.querySelector('.main-svg')"
    )
    WebDriverWait(driver, WAIT_S).until(
        lambda running: running.execute_script(script), "the chart is not drawn"
    )


def text_of(url: str, css: str, wait_css: str = "") -> str:
    """Text of the first element that matches, once it is there, and ``wait_css`` too if given."""
    with browser() as driver:
        driver.get(url)
        wait_for(driver, wait_css or css)
        return str(driver.find_element(By.CSS_SELECTOR, css).text)


def from_module(driver: Chrome, name: str, expression: str) -> Any:
    """Value of a JavaScript expression over what a module of the page exports, ``m``."""
    script = f'const [done] = arguments; import("/static/{name}").then((m) => done({expression}))'
    return driver.execute_async_script(script)


OVER_A_SILENCE = """(() => {
  const seconds = [1, 2, 3, 64, 65, 66], same = (value) => seconds.map(() => value);
  m.loadTrend({at_us: seconds.map((second) => second * 1e6),
    slas: {"a/b": {latency_us: same(5000), threshold_us: same(9000), throttled: same(true)}}});
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  m.drawSpark(svg, "a/b");
  return svg.lastChild.getAttribute("d");
})()"""
"""Of chart.js: the path drawn of a trend with a minute in its middle of which there is nothing."""
WORDS_OF_A_LOOP = """m.throttleWords({source: "control", backend: "d", victim: "b/x", state: "seen"},
  [{backend: "c", victims: ["z/x"]}, {backend: "d", victims: ["a/x", "b/x"]}])"""
"""Of format.js: what is said of a throttle by which a loop helps two promises."""
