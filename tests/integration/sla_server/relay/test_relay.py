"""A server's webhook, a relay, and recipients of its site, as processes; one fails, or is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from sla_server.events.recipients.webhook import body, signature
from tests.support.notices import notice
from tests.support.receivers import HttpReceiver, request_of, status
from tests.support.relays import SECRET, Chain, documents, without_repeats
from tests.support.stage import free_port

BATCH = 3


class Moody:
    """A webhook of the relay's site that answers ``code``."""

    def __init__(self) -> None:
        self.code = 500
        self.good: list[str] = []
        self.receiver = HttpReceiver(self._answer)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        code, content = self.code, request_of(handler)[3]
        if code == 200:
            self.good += [each["delivery"]["delivery_id"] for each in json.loads(content)["alerts"]]
        status(code)(handler)


@pytest.fixture
def moody() -> Iterator[Moody]:
    found = Moody()
    with found.receiver:
        yield found


def three(moody: Moody) -> str:
    """Two files, one of them for critical events, a webhook that fails, and the relay's own events."""
    return documents(
        all=("{file: {path: all.jsonl}, batch: 3}", "{elements: [gateway]}"),
        critical=(
            "{file: {path: critical.jsonl}, batch: 3}",
            "{elements: [gateway], severities: [critical]}",
        ),
        moody=(
            f'{{webhook: {{url: "{moody.receiver.url}"}}, batch: 3, timeout: 50s}}',
            "{elements: [gateway]}",
        ),
        ops=("{file: {path: ops.jsonl}}", "{elements: [relay, recipient]}"),
    )


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Chain]:
    with Chain(tmp_path) as found:
        yield found


def raise_both(sites: Chain, count: int) -> list[str]:
    """Events of both severities in turn; returns the critical ones."""
    for _ in range(count):
        sites.raise_some(1)
        sites.raise_some(1, severity="critical", kind="cuts-lost")
    return sites.raised[1::2]


def test_each_recipient_gets_its_subclass_in_order_and_none_waits_for_another(
    sites: Chain, moody: Moody
) -> None:
    sites.configure(three(moody))
    sites.start_relay()
    sites.start_server(BATCH)
    critical = raise_both(sites, 5)
    sites.wait(lambda: len(sites.lines("all")) == 10 and len(sites.lines("critical")) == 5, "events")
    assert (sites.lines("all"), sites.lines("critical"), moody.good) == (sites.raised, critical, [])
    sites.wait(lambda: sites.confirmed_there() == 10, "the confirmation on record")
    sites.wait(lambda: "recipient-failing" in kinds(sites), "the relay's own event")
    assert kinds(sites)[0] == "relay-started"
    words = "in trouble: recipient moody does not confirm: retry: HTTP 500"
    sites.wait(lambda: words in (told := sites.status()).stdout and told.returncode == 1, "what status says")
    moody.code = 200
    sites.wait(lambda: len(moody.good) == 10, "the webhook's events")
    assert moody.good == sites.raised
    sites.wait(lambda: not sites.state()["undelivered"], "an empty queue")
    sites.wait(lambda: "recipient-recovered" in kinds(sites), "the event that it recovered")
    sites.wait(lambda: sites.status().returncode == 0, "all well")
    found = json.loads(sites.status("-o", "json").stdout)
    assert found["confirm"] == "record"
    assert [(each["name"], each["taken"], each["repeated"]) for each in found["senders"]] == [
        ("site-a", 10, 0)
    ]
    assert sites.kill("relay", 15) == 0
    assert sites.status().returncode == 69


def kinds(sites: Chain) -> list[str]:
    return [each["event"]["kind"] for each in sites.notices("ops")]


def test_a_relay_that_is_killed_replays_before_anything_new(sites: Chain, moody: Moody) -> None:
    sites.configure(three(moody))
    sites.start_relay()
    sites.start_server(BATCH)
    raise_both(sites, 4)
    sites.wait(lambda: sites.confirmed_there() == 8 and len(sites.lines("all")) == 8, "the first events")
    sites.kill("relay")
    critical = raise_both(sites, 4)
    moody.code = 200
    sites.start_relay()
    sites.wait(lambda: len(set(moody.good)) == 16, "all events at the webhook")
    sites.wait(lambda: len(set(sites.lines("all"))) == 16, "all events")
    sites.wait(lambda: len(set(sites.lines("critical"))) == 8, "all critical events")
    assert without_repeats(moody.good) == sites.raised
    assert without_repeats(sites.lines("all")) == sites.raised
    assert without_repeats(sites.lines("critical")) == critical
    for got in (moody.good, sites.lines("all"), sites.lines("critical")):
        assert sum(Counter(got).values()) - len(set(got)) <= BATCH  # what was under way at the kill


def test_final_confirmation_waits_for_the_last_recipient_also_over_a_kill(sites: Chain, moody: Moody) -> None:
    sites.configure(three(moody), confirm="final", final_wait_s=0.2)
    sites.start_relay()
    sites.start_server(BATCH)
    sites.raise_some(3)
    sites.wait(lambda: sites.lines("all") == sites.raised, "the events here")
    sites.wait(
        lambda: sites.state("relay").get("answers", {}).get("503", 0) >= 2, "answers that ask to come again"
    )
    assert sites.confirmed_there() == 0
    sites.kill("relay")
    sites.start_relay()
    sites.wait(lambda: sites.state("relay").get("answers", {}).get("503", 0) >= 1, "the same after the kill")
    assert sites.confirmed_there() == 0
    moody.code = 200
    sites.wait(lambda: sites.confirmed_there() == 3, "the final confirmation")
    assert moody.good == sites.raised
    assert without_repeats(sites.lines("all")) == sites.raised


def post(sites: Chain, content: bytes, signed: str | None = None, **headers: str) -> tuple[int, str]:
    signed = signature(SECRET, int(time.time()), content) if signed is None else signed
    request = urllib.request.Request(sites.url, content, {"Sla-Signature": signed, **headers}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def recorded(sites: Chain) -> tuple[int, int]:
    """Notices that were taken and dropped since the start."""
    (row,) = sites.state("relay")["senders"]
    return row["taken"], row["repeated"]


def test_a_post_that_comes_again_is_delivered_once_also_after_a_restart(sites: Chain) -> None:
    sites.configure(documents(all=("{file: {path: all.jsonl}}", "{elements: [sla]}")))
    sites.start_relay()
    notices: list[Any] = [notice(1), notice(2, event_fields={"subject": "other"})]
    content = json.dumps(body("relay", notices)).encode()
    assert post(sites, content)[0] == 200
    assert post(sites, content)[0] == 200
    sites.wait(lambda: len(sites.notices("all")) >= 2 and recorded(sites) == (2, 2), "both, once")
    sites.wait(
        lambda: not sites.state()["undelivered"] and sites.state()["queue_fullness"]["main"] == 0.0,
        "no event left",
    )
    assert sites.kill("relay", 15) == 0
    sites.start_relay()
    assert post(sites, content)[0] == 200
    third = json.dumps(body("relay", [notice(3, event_fields={"subject": "third"})])).encode()
    assert post(sites, third)[0] == 200
    sites.wait(lambda: len(sites.notices("all")) >= 3, "what is new")
    got = [each["delivery_id"] for each in sites.notices("all")]
    assert got == ["event-1", "event-2", "event-3"]


def test_what_is_not_let_in_is_not_recorded(sites: Chain) -> None:
    sites.configure(documents(all=("{file: {path: all.jsonl}}", "{}")), max_body_bytes=65536)
    sites.start_relay()
    content = json.dumps(body("relay", [notice(1)])).encode()
    assert post(sites, content, signature("wrong", int(time.time()), content))[0] == 401
    assert post(sites, content, signature(SECRET, int(time.time()) - 3600, content))[0] == 401
    large = json.dumps(
        body("relay", [notice(n, event_fields={"text": "x" * 1900}) for n in range(40)])
    ).encode()
    code, text = post(sites, large)
    assert (code, "max_body_bytes here is 65536" in text) == (413, True)
    assert post(sites, b'{"alerts":[{"labels":{}}]}')[0] == 400
    sites.wait(lambda: sites.state("relay").get("answers") == {"401": 2, "413": 1, "400": 1}, "the answers")
    assert recorded(sites) == (0, 0)
    assert [each["event"]["element"] for each in sites.notices("all")] in ([], ["relay"])


def test_documents_that_change_count_and_wrong_ones_leave_those_of_before(sites: Chain) -> None:
    first = documents(
        all=("{file: {path: all.jsonl}}", "{elements: [sla]}"),
        ops=("{file: {path: ops.jsonl}}", "{elements: [relay]}"),
    )
    sites.configure(first)
    sites.start_relay()
    sites.configure(first.replace("all.jsonl", "../all.jsonl"))
    sites.wait(lambda: "relay-documents-refused" in kinds(sites), "the event")
    assert post(sites, json.dumps(body("relay", [notice(1)])).encode())[0] == 200
    sites.wait(lambda: len(sites.notices("all")) == 1, "delivery by the documents of before")
    assert sites.kill("relay", 15) == 0
    sites.start_relay()  # with wrong documents, and those of before
    sites.configure(first.replace("all.jsonl", "other.jsonl"))
    sites.wait(lambda: "relay-documents-taken" in kinds(sites), "the end of that event")
    assert (
        post(sites, json.dumps(body("relay", [notice(2, event_fields={"subject": "x"})])).encode())[0] == 200
    )
    sites.wait(lambda: len(sites.notices("other")) == 1, "delivery by the new documents")


def test_two_relays_of_one_directory_and_a_first_start_without_documents_are_refused(sites: Chain) -> None:
    def started() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sla_server", "relay", "--config", str(sites.site)],
            capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parents[4],
        )  # fmt: skip

    sites.configure("")
    found = started()
    assert (found.returncode, "there is no document in the text" in found.stderr) == (78, True)
    sites.configure(documents(all=("{file: {path: all.jsonl}}", "{}")))
    sites.start_relay()
    found = started()
    assert (found.returncode, "is in use by process" in found.stderr) == (75, True)


def test_events_of_the_relay_itself_come_to_a_server_that_receives_and_not_round_in_a_circle(
    sites: Chain, moody: Moody
) -> None:
    port = free_port()
    for folder in (sites.data, sites.server / "data"):
        (folder / "secrets" / "back.key").write_text("other")
        (folder / "secrets" / "back.key").chmod(0o600)
    back = (
        f'{{webhook: {{url: "http://127.0.0.1:{port}/events/site-b", secret_file: back.key}}, timeout: 50s}}'
    )
    sites.configure(
        documents(
            moody=(f'{{webhook: {{url: "{moody.receiver.url}"}}, timeout: 50s}}', "{elements: [gateway]}"),
            back=(back, "{elements: [relay, recipient]}"),
        )
    )
    hook = f'{{webhook: {{url: "{sites.url}", secret_file: relay.key}}, timeout: 50s}}'
    sites.start_server(
        text=documents(
            relay=(hook, "{}"), ops=("{file: {path: ops.jsonl}}", "{elements: [relay, recipient]}")
        ),
        tables=f'[events.receive]\nlisten = "127.0.0.1:{port}"\n'
        '[[events.receive.sender]]\nname = "site-b"\nsecret_file = "back.key"\n',
    )
    sites.start_relay()
    sites.raise_some(1)
    there = sites.server / "data" / "notices" / "ops.jsonl"

    def told() -> list[tuple[str, str, str]]:
        whole = there.read_text().split("\n")[:-1] if there.exists() else []
        found = [json.loads(line)["event"] for line in whole]
        return [(each["kind"], each["subject"], each["source"]) for each in found]

    sites.wait(lambda: ("recipient-failing", "moody", "relay") in told(), "the relay's trouble at the server")
    assert ("relay-started", "relay", "relay") in told()
    sites.wait(lambda: recorded(sites)[1] >= 2, "both sent back, and dropped")
    moody.code = 200
    sites.wait(lambda: ("recipient-recovered", "moody", "relay") in told(), "its end")
    assert len(told()) == len(set(told()))
