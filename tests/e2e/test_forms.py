"""Forms of the page in a real browser: each says what would come of it before it is done."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.agreements.periods import from_local
from sla_server.api.roles import Principal, Role
from sla_server.api.scope import LabelScope
from tests.support import api
from tests.support.axe import violations
from tests.support.browser import Page, console_errors, reshape, take_session, until, wait_for
from tests.support.site import Site

pytestmark = pytest.mark.e2e
FORMS = {
    "apply": "#editor",
    "agreements": "#actions",
    "agreements/erp-gold": "#maintenance-open",
    "volumes/batch": "#throttle",
    "backends/disk-0": "#mode-open",
    "events": "#silence-open",
}
"""What opens the form, or is it, by view."""


@pytest.fixture
def site(site: Site) -> Site:
    site.mailbox.answer = answer
    return site


def answer(header: dict[str, Any], in_force: int | None = None) -> tuple[bool, int, dict[str, Any]]:
    """Reads documents as ``services`` does, and takes those that are right."""
    if header["op"] != "apply":
        return True, 200, {}
    try:
        (loaded,) = load_documents(header["body"]["documents"], 60)
    except AgreementsRefused as exc:
        return False, 422, {"errors": [problem.as_dict() for problem in exc.problems]}
    kind, name = loaded.document.kind, loaded.document.name
    key = name if kind == "SLA" else f"{kind}/{name}"
    if in_force is not None and header["body"].get("based_on", {}).get(key, in_force) != in_force:
        return False, 409, {"errors": [{"line": 0, "problem": f"{name} has changed since", "fix": "See it"}]}
    row = {"name": name, "version": 3 if name == "erp-gold" else 1, "changed": True}
    return True, 200, {"applied": [row if kind == "SLA" else {"kind": kind, **row}], "warnings": []}


def text(driver: Chrome, css: str) -> str:
    return " ".join(driver.find_element(By.CSS_SELECTOR, css).text.split())


def sign_in(driver: Chrome, site: Site, view: str) -> None:
    take_session(driver, site.url, site.server.context.logins.issue())
    driver.get(f"{site.url}{view}")


def source(driver: Chrome) -> str:
    return str(driver.find_element(By.ID, "text").get_property("value"))


def checked(driver: Chrome) -> str:
    """What the server said of the text as it is now; empty while it has not been asked."""
    script = "return document.getElementById('apply').disabled"
    return "" if driver.execute_script(script) else text(driver, "#valid")


def fill(driver: Chrome, css: str, **values: str) -> None:
    for name, value in values.items():
        field = driver.find_element(By.CSS_SELECTOR, f"{css} [name={name}]")
        if field.tag_name == "select":
            Select(field).select_by_value(value)
        else:
            field.clear()
            field.send_keys(value)


def says(driver: Chrome, dialog: str, *words: str) -> None:
    for each in words:
        until(driver, lambda each=each: each in text(driver, f"{dialog} .consequence"), f"{dialog}: {each}")
    assert violations(driver) == []


def applied(site: Site) -> list[dict[str, Any]]:
    """Documents that were applied, not only tried."""
    bodies = [header["body"] for header in list(site.mailbox.posted) if header["op"] == "apply"]
    return [yaml.safe_load(body["documents"]) for body in bodies if not body.get("dry_run")]


def operations(site: Site) -> list[str]:
    return [header["op"] for header in list(site.mailbox.posted)]


def picture(driver: Chrome, name: str) -> None:
    if folder := os.environ.get("SLA_SCREENSHOTS"):
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def fits(driver: Chrome, name: str, height: int = 1400) -> None:
    """What is shown is within a wide page and a phone, light and dark, and axe-core finds nothing in both.

    The page is left as a phone.
    """
    for width in (1280, 390):
        reshape(driver, width, height, dark=width < 1000)
        assert violations(driver) == [], (name, width)
        picture(driver, f"{name}-{width}")


def test_an_agreement_is_checked_as_it_is_written_and_applied_after_a_question(
    site: Site, page: Page
) -> None:
    with page(390, 1400, dark=True) as driver:
        sign_in(driver, site, "apply")
        wait_for(driver, "#editor", visible=True)
        fill(driver, "#fields", name="orders", volumes="batch", customer="acme: inc")
        words = "Line 5: spec.parties.provider: is required Add the key provider"
        # What was refused first may be the text as it was before the last field.
        until(driver, lambda: words in text(driver, "#problems"), "the server has refused it")
        assert text(driver, "#valid") == "not valid"
        assert driver.find_element(By.ID, "apply").get_property("disabled")
        fill(driver, "#fields", provider="storage-team", value="7.5")
        for metric in ("iops", "throughput", "", "latency"):
            Select(driver.find_element(By.NAME, "metric")).select_by_value(metric)
            until(
                driver,
                lambda metric=metric: f"name: {metric}" in source(driver) or not metric,
                "the document",
            )
            until(driver, lambda: checked(driver) == "valid", f"a promise of {metric} is valid")
        assert "orders comes into force" in text(driver, "#valid-words")
        until(
            driver,
            lambda: text(driver, "#admit") in ("not known", "can be kept", "cannot be kept"),
            "admission",
        )
        assert "disk-0" in text(driver, "#reasons")
        fits(driver, "apply-form")
        assert applied(site) == [], "nothing but tried"
        driver.find_element(By.ID, "apply").send_keys(Keys.ENTER)
        says(driver, "#apply-dialog", "orders comes into force, and is judged from now on.")
        driver.find_element(By.CSS_SELECTOR, "#apply-dialog [type=submit]").click()
        until(driver, lambda: driver.current_url.endswith("/agreements/orders"), "its view")
    (document,) = applied(site)
    assert document["spec"]["parties"] == {"provider": "storage-team", "customer": "acme: inc"}
    assert document["spec"]["scope"] == {"volumes": ["batch"]}
    assert document["spec"]["objectives"][0]["demand_curve"] == [{"up_to_iops": 1000, "value_ms": 7.5}]
    assert document["spec"]["objectives"][0]["budgeting"]["target"] == 0.995


def test_a_document_in_force_is_changed_as_text(site: Site, page: Page) -> None:
    with page() as driver:
        sign_in(driver, site, "agreements/erp-gold")
        wait_for(driver, "#edit", visible=True)
        driver.find_element(By.ID, "edit").click()
        wait_for(driver, "#editor", visible=True)
        until(driver, lambda: text(driver, "#valid") == "valid", "what is in force is valid")
        assert "version 3 replaces version 2" in text(driver, "#valid-words")
        assert "kind: SLA" in driver.find_element(By.ID, "text").get_property("value")
        assert not driver.find_element(By.ID, "fields").is_displayed(), "they would replace all of it"
        driver.find_element(By.ID, "begin-again").send_keys(Keys.ENTER)
        wait_for(driver, "#fields [name=name]", visible=True)
        assert not driver.find_element(By.ID, "as-text").is_displayed()


def test_what_another_changed_meanwhile_is_said_and_nothing_that_was_typed_is_lost(
    site: Site, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    with page() as driver:
        sign_in(driver, site, "apply?name=erp-gold")
        wait_for(driver, "#editor", visible=True)
        until(driver, lambda: checked(driver) == "valid", "what is in force is valid")
        driver.find_element(By.ID, "text").send_keys("# mine")
        until(driver, lambda: checked(driver) == "valid", "so is what was typed")
        stored = site.source.agreement_versions("erp-gold")
        third = {**stored[-1], "version": 3, "applied_by": "bob", "spec": {"priority": "silver"}}
        monkeypatch.setattr(site.source, "agreement_versions", lambda name: [*stored, third])
        site.mailbox.answer = lambda header: answer(header, in_force=3)
        driver.find_element(By.ID, "apply").send_keys(Keys.ENTER)
        wait_for(driver, "#apply-dialog[open]")
        driver.find_element(By.CSS_SELECTOR, "#apply-dialog [type=submit]").click()
        until(
            driver, lambda: "erp-gold has changed since" in text(driver, "#apply-dialog .problem"), "refused"
        )
        driver.find_element(By.CSS_SELECTOR, "#apply-dialog [value=cancel]").click()
        wait_for(driver, "#conflict", visible=True)
        assert "Version 3" in text(driver, "#conflict-versions")
        assert "by bob" in text(driver, "#conflict-versions")
        assert "Version 2" not in text(driver, "#conflict-versions")
        assert source(driver).endswith("# mine")
        assert driver.find_element(By.ID, "apply").get_property("disabled")
        assert violations(driver) == []
        driver.find_element(By.ID, "conflict-keep").send_keys(Keys.ENTER)
        until(driver, lambda: checked(driver) == "valid", "it is based on what was seen")
        assert not driver.find_element(By.ID, "conflict").is_displayed()
        driver.find_element(By.ID, "apply").send_keys(Keys.ENTER)
        wait_for(driver, "#apply-dialog[open]")
        driver.find_element(By.CSS_SELECTOR, "#apply-dialog [type=submit]").click()
        until(driver, lambda: driver.current_url.endswith("/agreements/erp-gold"), "it is applied")
    bodies = [header["body"] for header in site.mailbox.posted if header["op"] == "apply"]
    asked = [(body["based_on"]["erp-gold"], body["documents"][-6:]) for body in bodies if not body["dry_run"]]
    assert asked == [(2, "# mine"), (3, "# mine")]


def test_maintenance_silence_throttle_and_mode_say_what_they_do(site: Site, page: Page) -> None:
    with page() as driver:
        sign_in(driver, site, "agreements/erp-gold")
        wait_for(driver, "#maintenance-open", visible=True)
        driver.find_element(By.ID, "maintenance-open").click()
        fill(driver, "#maintenance-form", duration="4h", reason="new disks")
        says(driver, "#maintenance-dialog", "bad slices of erp-gold do not count")
        picture(driver, "maintenance-form")
        driver.find_element(By.CSS_SELECTOR, "#maintenance-form [type=submit]").click()
        until(driver, lambda: len(applied(site)) == 1, "the maintenance")
        driver.get(f"{site.url}events")
        wait_for(driver, "#silence-open", visible=True)
        driver.find_element(By.ID, "silence-open").click()
        fill(driver, "#silence-form", duration="4h", kind="gateway-*", reason="move")
        says(driver, "#silence-dialog", "no person is notified", "of them wait")
        driver.find_element(By.CSS_SELECTOR, "#silence-form [type=submit]").click()
        until(driver, lambda: len(applied(site)) == 2, "the silence")
        driver.get(f"{site.url}volumes/batch")
        wait_for(driver, "#throttle", visible=True)
        driver.find_element(By.ID, "throttle").click()
        fill(driver, "#throttle-form", rate="100", duration="14400", reason="backup")
        says(
            driver,
            "#throttle-dialog",
            "batch will be held to 100 IOPS until",
            "It does 291 IOPS now: its I/Os will wait",
        )
        picture(driver, "throttle-form")
        driver.find_element(By.CSS_SELECTOR, "#throttle-form [type=submit]").click()
        # A browser that goes to another page gives up what it has not sent yet.
        until(driver, lambda: "throttle_set" in operations(site), "the throttle was asked for")
        driver.get(f"{site.url}backends/disk-0")
        wait_for(driver, "#mode-open", visible=True)
        driver.find_element(By.ID, "mode-open").click()
        says(
            driver,
            "#backend-mode-dialog",
            "Volumes that are held to 290 weighted IOPS together are free at once",
        )
        driver.find_element(By.CSS_SELECTOR, "#backend-mode-dialog [type=submit]").click()
        until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "dialog[open]"), "it is set")
        assert console_errors(driver) == []
    maintenance, silence = applied(site)
    assert (maintenance["kind"], maintenance["spec"]["scope"]) == (
        "Maintenance",
        {"agreements": ["erp-gold"]},
    )
    assert (silence["kind"], silence["spec"]["match"]["kinds"]) == ("Silence", ["gateway-*"])
    others = [(header["op"], header["body"]) for header in site.mailbox.posted if header["op"] != "apply"]
    expected = {"volume": "batch", "iops": 100.0, "duration_s": 14_400.0, "reason": "backup"}
    assert others == [("throttle_set", expected), ("mode", {"mode": "observe", "backend": "disk-0"})]


def test_a_policy_is_rolled_back_or_pinned_after_it_was_said_what_comes_of_it(
    site: Site, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    (third,) = site.source.policies()
    rows = [third, {**third, "version": 2, "state": "superseded"}]
    monkeypatch.setattr(site.source, "policies", lambda limit=20: rows[:limit])
    with page() as driver:
        driver.get(f"{site.url}policies/3")
        until(driver, lambda: "sla login" in text(driver, "#session"), "it is known who looks")
        assert not driver.find_element(By.ID, "roll-back").is_displayed()
        sign_in(driver, site, "policies/3")
        wait_for(driver, "#roll-back", visible=True)
        assert not driver.find_element(By.ID, "unpin").is_displayed()
        driver.find_element(By.ID, "roll-back").click()
        says(driver, "#ask-dialog", "version 2 is in force again", "Caps of 1 volume differ from then on.")
        confirm(driver, "#ask-dialog")
        until(driver, lambda: "Version 3 is rolled back." in text(driver, "#banner"), "it is said")
        driver.find_element(By.ID, "pin").click()
        says(driver, "#ask-dialog", "Version 3 is in force from now on, whatever is published")
        rows[0] = {**third, "state": "pinned"}
        confirm(driver, "#ask-dialog")
        wait_for(driver, "#unpin", visible=True)
        assert not driver.find_element(By.ID, "roll-back").is_displayed(), "what is pinned is unpinned first"
        driver.find_element(By.ID, "unpin").click()
        says(driver, "#ask-dialog", "Version 3 is the newest: it stays in force")
        confirm(driver, "#ask-dialog")
        until(driver, lambda: len(operations(site)) == 3, "all three were asked for")
        assert console_errors(driver) == []
    bodies = [(header["op"], header["body"]) for header in site.mailbox.posted]
    pins = [("policy_pin", {"version": 3}), ("policy_pin", {"version": None})]
    assert bodies == [("policy_rollback", {"version": 3}), *pins]


PRESS = "document.getElementById('throttle-form').requestSubmit();"


def test_a_form_is_sent_once_and_what_is_meant_all_the_same_is_of_what_was_refused(
    site: Site, page: Page
) -> None:
    refusal = {"errors": [{"line": 0, "problem": "below what is promised", "fix": "--force"}]}
    site.mailbox.answer = lambda header: (
        (False, 409, refusal) if header["body"].get("iops", 300) < 3 else (True, 200, {"throttle_id": "t"})
    )
    with page() as driver:
        sign_in(driver, site, "volumes/batch")
        wait_for(driver, "#throttle", visible=True)
        driver.find_element(By.ID, "throttle").click()
        fill(driver, "#throttle-form", rate="1", reason="try")
        driver.execute_script(PRESS)
        wait_for(driver, "#throttle-form [name=force]", visible=True)
        driver.find_element(By.CSS_SELECTOR, "#throttle-form [name=force]").click()
        fill(driver, "#throttle-form", rate="2")
        assert not driver.find_element(By.CSS_SELECTOR, "#throttle-form [name=force]").is_displayed()
        driver.execute_script(PRESS)
        wait_for(driver, "#throttle-form .problem", visible=True)
        fill(driver, "#throttle-form", rate="300")
        driver.execute_script(PRESS + PRESS)
        until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "dialog[open]"), "it is set")
    bodies = [header["body"] for header in site.mailbox.posted if header["op"] == "throttle_set"]
    asked = [(body["iops"], body.get("force")) for body in bodies]
    assert asked == [(1.0, None), (2.0, None), (300.0, None)]


def test_without_the_right_to_change_there_is_no_form(site: Site, page: Page) -> None:
    with page() as driver:
        for view, css in FORMS.items():
            driver.get(f"{site.url}{view}")
            until(driver, lambda: "sla login" in text(driver, "#session"), "it is known who looks")
            assert not driver.find_element(By.CSS_SELECTOR, css).is_displayed(), view
        driver.get(f"{site.url}apply")
        wait_for(driver, "#not-here", visible=True)


def press(driver: Chrome, row: str, label: str) -> None:
    """The button of that label in the row of a user, a session or a token."""
    until(
        driver,
        lambda: driver.find_elements(By.XPATH, f"//tr[@data-user='{row}']//button[text()='{label}']"),
        f"{label} of {row}",
    )
    driver.find_element(By.XPATH, f"//tr[@data-user='{row}']//button[text()='{label}']").click()


def confirm(driver: Chrome, dialog: str) -> None:
    driver.find_element(By.CSS_SELECTOR, f"{dialog} [type=submit]").click()
    until(
        driver,
        lambda: not driver.find_element(By.CSS_SELECTOR, dialog).get_property("open"),
        f"{dialog} ends",
    )


def test_an_administrator_adds_changes_and_shuts_out_who_may_come_in(site: Site, page: Page) -> None:
    with page(390, 1000, dark=True) as driver:
        sign_in(driver, site, "users")
        wait_for(driver, "#users-add", visible=True)
        driver.find_element(By.ID, "users-add").click()
        fill(driver, "#user-add-form", name="glo", password="six large pelicans", labels="customer=acme")
        says(driver, "#user-add-dialog", "glo may sign in", "agreements with customer=acme alone")
        fits(driver, "users-add", 1000)
        fill(driver, "#user-add-form", role="admin")
        driver.find_element(By.CSS_SELECTOR, "#user-add-form [type=submit]").click()
        until(driver, lambda: "so its role is viewer" in text(driver, "#user-add-form .problem"), "refused")
        fill(driver, "#user-add-form", role="viewer")
        confirm(driver, "#user-add-dialog")
        wait_for(driver, "[data-user=glo]")
        assert "customer=acme" in text(driver, "[data-user=glo]")
        press(driver, "ann", "Change…")
        fill(driver, "#user-change-form", role="viewer")
        says(
            driver, "#user-change-dialog", "ann was operator, and reads, and asks what would be from now on."
        )
        says(driver, "#user-change-dialog", "1 session of ann end")
        fits(driver, "users-change", 1000)
        confirm(driver, "#user-change-dialog")
        press(driver, "ann", "Disable…")
        says(driver, "#ask-dialog", "ann cannot sign in any more")
        confirm(driver, "#ask-dialog")
        until(driver, lambda: "disabled" in text(driver, "[data-user=ann]"), "the state of ann")
        assert "viewer" in text(driver, "[data-user=ann]")
        press(driver, "glo", "Sign out…")
        says(driver, "#ask-dialog", "0 sessions of glo end at once.")
        confirm(driver, "#ask-dialog")
        fits(driver, "users", 1000)
        driver.find_element(By.LINK_TEXT, "API tokens").click()
        wait_for(driver, "#users-add", visible=True)
        assert driver.current_url.endswith("/users?show=tokens")
        press(driver, "70c3", "Revoke…")
        says(driver, "#ask-dialog", "Programs that use this token (viewer, made by ann) are refused at once.")
        confirm(driver, "#ask-dialog")
        until(
            driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "[data-user='70c3']"), "it is revoked"
        )
        driver.find_element(By.ID, "users-add").click()
        fill(driver, "#token-form", name="grafana", days="30")
        says(driver, "#token-dialog", "Who has the token of grafana reads, and asks what would be, until")
        driver.find_element(By.CSS_SELECTOR, "#token-form [type=submit]").click()
        wait_for(driver, "#secret-dialog[open]")
        until(driver, lambda: text(driver, "#secret").startswith("sla_"), "its secret, this once")
        fits(driver, "users-token", 1000)
        driver.find_element(By.ID, "secret-close").click()
        until(driver, lambda: driver.find_element(By.ID, "secret").get_property("textContent") == "", "gone")
        driver.find_element(By.LINK_TEXT, "Sessions").click()
        wait_for(driver, "#users tbody [data-user]")
        until(driver, lambda: "this browser" in text(driver, "#users"), "the session that looks")
        fits(driver, "users-sessions", 1000)
        assert [line for line in console_errors(driver) if "400" not in line] == [], "but what was refused"
    actions = [header["body"]["action"] for header in site.mailbox.recorded]
    wanted = ["user-add", "user-change", "user-change", "sessions-end", "token-revoke", "token-create"]
    assert [each for each in actions if each in wanted] == wanted


def test_who_is_no_administrator_sees_their_own_sessions_alone(site: Site, page: Page) -> None:
    with page() as driver:
        operator = Principal("ann", Role.operator, account="ann")
        driver.get(f"{site.url}login?code={site.server.context.logins.issue(operator)}")
        driver.find_element(By.ID, "sign-in").click()
        until(driver, lambda: "signed in" in text(driver, "#session"), "signed in")
        driver.get(f"{site.url}users")
        until(driver, lambda: "are shown to administrators alone" in text(driver, "#users"), "why not")
        assert not driver.find_element(By.ID, "users-add").is_displayed()
        driver.find_element(By.LINK_TEXT, "Sessions").click()
        until(driver, lambda: "this browser" in text(driver, "#users"), "their own")


def test_enter_in_the_note_of_an_approval_decides_nothing(site: Site, page: Page) -> None:
    with page() as driver:
        sign_in(driver, site, "approvals")
        wait_for(driver, "[data-approval] button", visible=True)
        driver.find_element(By.CSS_SELECTOR, "[data-approval] button").click()
        driver.find_element(By.CSS_SELECTOR, "#approve-form [name=note]").send_keys("as agreed", Keys.ENTER)
        wait_for(driver, "#approve-dialog[open]")
        driver.find_element(By.CSS_SELECTOR, "#approve-form [value=refuse]").send_keys(Keys.ENTER)
        until(driver, lambda: "Refused: mode enforce" in text(driver, "#banner"), "refused by its button")
    asked = [header["body"] for header in site.mailbox.posted if header["op"] == "approval_decide"]
    assert [(body["approves"], body["note"]) for body in asked] == [(False, "as agreed")]


ANSWERS = """const done = arguments[0];
const shown = [...document.querySelectorAll("a[href]")].filter((link) => link.checkVisibility());
const addresses = [...new Set(shown.map((link) => link.href.split("#")[0]))];
const ask = (address) => fetch(address).then((answer) => [address, answer.status]);
Promise.all(addresses.map(ask)).then(done);"""
"""Each link that is drawn, with the status of what it leads to."""


def test_an_account_with_labels_is_told_nothing_of_what_it_does_not_see(site: Site, page: Page) -> None:
    with page() as driver:
        customer = Principal("glo", Role.viewer, labels="customer=acme")
        driver.get(f"{site.url}login?code={site.server.context.logins.issue(customer)}")
        driver.find_element(By.ID, "sign-in").click()
        wait_for(driver, "#slas [data-sla^=erp-gold]")
        for what in ("obody is throttled", "No gateway", "No policy", "in trouble", "Nothing has happened"):
            assert what not in text(driver, "main")
        assert "erp-gold" in text(driver, "#slas")
        assert violations(driver) == []
        for view, ready in (
            ("", "[data-sla]"),
            ("agreements/erp-gold", "#heat button"),
            ("volumes", "#volumes td"),
        ):
            driver.get(f"{site.url}{view}")
            wait_for(driver, ready, visible=True)
            until(driver, lambda: "glo" in text(driver, "#session"), "it is known who looks")
            for address, status in driver.execute_async_script(ANSWERS):
                assert status == 200, f"{address} on {view}"
            assert [
                each.text for each in driver.find_elements(By.CSS_SELECTOR, ".why") if each.is_displayed()
            ] == []
        driver.find_element(By.LINK_TEXT, "Reports").click()
        wait_for(driver, "h1")
        driver.find_element(By.LINK_TEXT, "erp-gold-2026-12").click()
        until(driver, lambda: "neighbour 1" in text(driver, "body"), "the copy of its report")
        for shown in (text(driver, "body"), driver.page_source):
            assert "batch" not in shown
        driver.back()
        picture(driver, "customer-reports")
        for address, status in driver.execute_async_script(ANSWERS):
            assert status == 200, f"{address} of the reports"
        assert violations(driver) == []


def test_an_account_with_labels_is_shown_nothing_as_known_that_it_is_not_told(
    site: Site, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that a cap of now held all the time, and not as live what is old."""
    monkeypatch.setattr(LabelScope, "has_volume", lambda _scope, volume: volume == "erp-db")
    with page() as driver:
        customer = Principal("glo", Role.viewer, labels="customer=acme")
        driver.get(f"{site.url}login?code={site.server.context.logins.issue(customer)}")
        driver.find_element(By.ID, "sign-in").click()
        wait_for(driver, "#slas [data-sla^=erp-gold]")
        driver.get(f"{site.url}volumes/erp-db")
        wait_for(driver, "#load-plot .main-svg")
        names = "return document.getElementById('load-plot').data.map((line) => line.name)"
        assert driver.execute_script(names) == ["IOPS", "weighted IOPS"]
        until(driver, lambda: text(driver, "#feed") == "live", "what is new is live")
        site.snapshot = None
        until(driver, lambda: text(driver, "#feed") == "no live data", "what is old is not")
        until(driver, lambda: "Cap –" in text(driver, "#figures"), "nor is its cap known")
        picture(driver, "customer-stale")


def test_times_are_of_the_zone_that_was_chosen(site: Site, page: Page) -> None:
    at_us = api.decisions()[0]["at_us"] + site.source.shift_us
    with page() as driver:
        driver.get(f"{site.url}volumes/batch")
        shown = "#decisions time"
        seen = {}
        for name in ("UTC", "Asia/Tokyo", "America/New_York"):
            wait_for(driver, f"#zone option[value='{name}']")
            Select(driver.find_element(By.ID, "zone")).select_by_value(name)
            until(driver, lambda name=name: chosen(driver) == name, "the page was loaded again")
            wait_for(driver, shown)
            script = """return new Intl.DateTimeFormat("en-GB",
              {timeStyle: "medium", timeZone: arguments[0]}).format(arguments[1])"""
            wanted = driver.execute_script(script, name, at_us / 1000)
            assert text(driver, shown).endswith(wanted)
            wait_for(driver, "#load-plot .main-svg")
            seen[name] = driver.execute_script(
                "return document.getElementById('load-plot').layout.xaxis.range[1]"
            )
            there = """return import("/static/zone.js").then((m) => m.fromWall(m.wallTime(arguments[0])))"""
            whole_ms = at_us // 1_000_000 * 1000
            assert driver.execute_script(there, whole_ms) == whole_ms
        assert len({each[:16] for each in seen.values()}) == 3, "charts, too"
        driver.get(f"{site.url}volumes")
        until(driver, lambda: chosen(driver) == "America/New_York", "kept in this browser")


CHANGES = {
    "Europe/Berlin": ("2026-03-29", "2026-10-25"),
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "Australia/Lord_Howe": ("2026-10-04", "2026-04-05"),
}
"""Days on which clocks are set forward, and back."""


@pytest.mark.parametrize("zone", CHANGES)
def test_a_time_on_the_clock_is_the_one_that_the_server_reads(site: Site, page: Page, zone: str) -> None:
    """Also one that comes twice, and one that is skipped."""
    walls = [f"{day}T{at // 2:02}:{at % 2 * 30:02}" for day in CHANGES[zone] for at in range(48)]
    script = """return import("/static/zone.js").then((m) => arguments[0].map((each) => m.fromWall(each)))"""
    with page() as driver:
        driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": zone})
        driver.get(f"{site.url}events")
        found = driver.execute_script(script, walls)
    wanted = [from_local(datetime.fromisoformat(wall), zone) // 1000 for wall in walls]
    assert dict(zip(walls, found, strict=True)) == dict(zip(walls, wanted, strict=True))


def chosen(driver: Chrome) -> str:
    script = (
        "return document.readyState === 'complete' && document.querySelector('#zone option[selected]')?.value"
    )
    return str(driver.execute_script(script))


KINDS = {
    "Recipient": (
        {"name": "oncall", "way": "webhook", "url": "https://host.example/hook", "secret_file": "oncall.key"},
        {"webhook": {"url": "https://host.example/hook", "secret_file": "oncall.key"}},
        "oncall comes into force; events go to it once a route names it.",
        "events",
    ),
    "Route": (
        {
            "name": "nights",
            "severities": "critical",
            "kinds": "violation-*",
            "recipients": "mail",
            "remind": "1h",
            "escalate": "boss, mail",
            "after": "15m",
        },
        {
            "match": {"severities": ["critical"], "kinds": ["violation-*"]},
            "recipients": ["mail"],
            "remind": "1h",
            "escalate": {"after": "15m", "recipients": ["boss", "mail"]},
        },
        "such events go to its recipients from now on",
        "events",
    ),
    "Calendar": (
        {"name": "shop", "days": "mon,tue,wed,thu,fri,sat", "holidays": "2026-12-25, 2026-12-26"},
        {
            "tz": "UTC",
            "hours": [{"days": ["mon", "tue", "wed", "thu", "fri", "sat"], "from": "08:00", "to": "18:00"}],
            "holidays": ["2026-12-25", "2026-12-26"],
        },
        "an agreement that names it counts its hours alone",
        "agreements",
    ),
    "VolumeLabels": (
        {"name": "erp", "volumes": "erp-*, batch", "labels": "tier=gold, on=2, env-"},
        {"volumes": ["erp-*", "batch"], "labels": {"tier": "gold", "on": "2", "env": None}},
        "its volumes have these labels at once",
        "volumes",
    ),
    "Maintenance": (
        {"name": "disks", "about": "volumes", "names": "erp-*", "duration": "4h", "reason": "new disks: all"},
        {"scope": {"volumes": ["erp-*"]}, "duration": "4h", "tz": "UTC", "reason": "new disks: all"},
        "what it is about does not count meanwhile",
        "apply",
    ),
}
"""What is filled in, what the document says then, what is said before, and which view follows."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_document_has_a_form_that_is_checked_as_it_is_filled_in(
    site: Site, page: Page, kind: str
) -> None:
    given, wanted, words, view = KINDS[kind]
    with page(390, 1400, dark=True) as driver:
        driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "UTC"})
        sign_in(driver, site, f"apply?kind={kind}&name=x")
        wait_for(driver, "#editor", visible=True)
        wait_for(driver, f"[data-kind={kind}]", visible=True)
        for other in KINDS.keys() - {kind}:
            assert not driver.find_element(By.CSS_SELECTOR, f"[data-kind={other}]").is_displayed()
        fill(driver, "#fields", name="-")
        fill(driver, f"[data-kind={kind}]", **{key: value for key, value in given.items() if key != "name"})
        until(driver, lambda: "metadata.name" in text(driver, "#problems"), "the server refuses its name")
        assert text(driver, "#valid") == "not valid"
        assert driver.find_element(By.ID, "apply").get_property("disabled")
        fill(driver, "#fields", name=given["name"])
        name = f"name: {given['name']}}}"
        until(driver, lambda: name in source(driver) and checked(driver) == "valid", "it is valid")
        assert not driver.find_element(By.ID, "admit").is_displayed(), "that is asked of agreements alone"
        fits(driver, f"apply-{kind}")
        assert applied(site) == [], "nothing but tried"
        driver.find_element(By.ID, "apply").send_keys(Keys.ENTER)
        says(driver, "#apply-dialog", words)
        driver.find_element(By.CSS_SELECTOR, "#apply-dialog [type=submit]").click()
        until(driver, lambda: len(applied(site)) == 1, "it is applied")
        until(driver, lambda: f"/{view}" in driver.current_url, "where it is shown")
    (document,) = applied(site)
    assert (document["kind"], document["metadata"]) == (kind, {"name": given["name"]})
    spec = document["spec"]
    if kind == "Maintenance":
        assert spec.pop("start").endswith(":00"), "the next whole hour, unless another one is chosen"
    assert spec == wanted


WAYS = {
    "smtp": {"server": "mail.example", "sender": "a@b.example", "to": "c@d.example, e@f.example"},
    "alertmanager": {"url": "https://host.example", "bearer_file": "am.token"},
    "heartbeat": {"url": "https://host.example/beat"},
    "apprise": {"url_file": "apprise.urls"},
    "syslog": {"server": "log.example", "tls": "true"},
    "file": {"path": "events.jsonl"},
    "command": {"argv": "page.sh  storage"},
    "inbox": {},
}


def test_each_way_to_a_recipient_asks_for_what_it_needs(site: Site, page: Page) -> None:
    with page() as driver:
        sign_in(driver, site, "apply?kind=Recipient")
        wait_for(driver, "[data-kind=Recipient]", visible=True)
        fill(driver, "#fields", name="out")
        for way, fields in WAYS.items():
            Select(driver.find_element(By.NAME, "way")).select_by_value(way)
            fill(driver, "[data-kind=Recipient]", **fields)
            until(driver, lambda way=way: f"  {way}:" in source(driver), f"the document of {way}")
            until(driver, lambda: checked(driver) == "valid", f"{way} is valid")
            shown = [
                field.get_attribute("name")
                for field in driver.find_elements(By.CSS_SELECTOR, "[data-kind=Recipient] :is(input, select)")
                if field.is_displayed()
            ]
            assert set(fields) <= set(shown), way
            assert ("password_file" in shown) == (way == "smtp")


LISTED = {
    "Route": "severities warning, critical → mail",
    "Calendar": "–",
    "VolumeLabels": "vol-17: tier=gold, without env",
}
"""What is said of each."""


@pytest.mark.parametrize(
    ("view", "kind", "name"),
    [("events", "Route", "all"), ("agreements", "Calendar", "bank"), ("volumes", "VolumeLabels", "vol-17")],
)
def test_documents_in_force_are_listed_changed_and_ended_where_they_belong(
    site: Site, page: Page, view: str, kind: str, name: str
) -> None:
    with page() as driver:
        driver.get(f"{site.url}{view}")
        wait_for(driver, f"[data-document={name}]")
        until(driver, lambda: "sla login" in text(driver, "#session"), "it is known who looks")
        assert not driver.find_element(By.CSS_SELECTOR, f"[data-document={name}] button").is_displayed()
        sign_in(driver, site, view)
        wait_for(driver, f"[data-document={name}] button", visible=True)
        assert LISTED[kind] in text(driver, f"[data-document={name}]")
        assert violations(driver) == []
        driver.find_element(By.CSS_SELECTOR, f"[data-document={name}] button").click()
        says(driver, "#ask-dialog", "")
        confirm(driver, "#ask-dialog")
        until(driver, lambda: "end_document" in operations(site), "its end was asked for")
        driver.find_element(By.CSS_SELECTOR, f"[data-document={name}] a").click()
        until(driver, lambda: f"name: {name}" in source(driver), "its text")
        until(driver, lambda: checked(driver) == "valid", "what is in force is valid")
        site.mailbox.answer = lambda header: answer(header, in_force=7)  # before the page asks, once
        driver.find_element(By.ID, "text").send_keys("# mine")
        until(driver, lambda: "has changed since" in text(driver, "#valid-words"), "based on what was loaded")
    ended = [header["body"] for header in site.mailbox.posted if header["op"] == "end_document"]
    assert ended == [{"kind": kind, "name": name}]
    based = [header["body"].get("based_on") for header in site.mailbox.posted if header["op"] == "apply"]
    assert based[-1] == {f"{kind}/{name}": 1}


def test_what_was_loaded_is_not_overwritten_after_a_look_at_the_form_of_another_kind(
    site: Site, page: Page
) -> None:
    with page() as driver:
        sign_in(driver, site, "apply?kind=Route&name=all")
        until(driver, lambda: "name: all" in source(driver) and checked(driver) == "valid", "its text")
        Select(driver.find_element(By.ID, "kind")).select_by_value("Calendar")
        wait_for(driver, "[data-kind=Calendar]", visible=True)
        site.mailbox.answer = lambda header: answer(header, in_force=7)
        driver.find_element(By.ID, "text").send_keys("# mine")
        until(driver, lambda: "has changed since" in text(driver, "#valid-words"), "based on what was loaded")
        assert driver.find_element(By.ID, "apply").get_property("disabled")


def test_a_kind_of_document_that_is_none_shows_the_form_of_an_agreement(site: Site, page: Page) -> None:
    with page() as driver:
        sign_in(driver, site, "apply?kind=constructor&name=x")
        wait_for(driver, "[data-kind=SLA]", visible=True)
        assert driver.find_element(By.ID, "kind").get_property("value") == "SLA"
