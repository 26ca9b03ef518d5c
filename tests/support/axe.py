"""Accessibility of a page by axe-core, run in the browser that shows it: WCAG 2.1 A and AA, good practice."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from selenium.webdriver import Chrome

LIMIT_S: Final = 600
RULES: Final = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
# Without "preload", which reads all style sheets for a rule that is none of these (css-orientation-lock).
RUN: Final = """
const done = arguments[arguments.length - 1];
axe.run(document, {runOnly: arguments[0], resultTypes: ["violations"], preload: false}).then(
  (found) => done(found.violations.map((rule) => [rule.id, rule.help,
    rule.nodes.map((node) => `${node.target.join(" ")} ${node.html.slice(0, 80)}:
      ${node.failureSummary.split("\\n").slice(1).join(";")}`)])),
  (error) => done([["axe", String(error), []]]));
"""


@cache
def _script() -> str:
    return files("axe_core_python").joinpath("axe.min.js").read_text()


def violations(driver: Chrome) -> list[str]:
    """What is wrong with the page as it is shown now: a line for each rule and element."""
    if not driver.execute_script("return Boolean(window.axe)"):
        driver.execute_script(_script())
    driver.set_script_timeout(LIMIT_S)  # 30 s else: on a loaded machine a large page takes longer
    found = driver.execute_async_script(RUN, RULES)
    return [f"{rule} ({words}) at {place}" for rule, words, places in found for place in places or ["?"]]
