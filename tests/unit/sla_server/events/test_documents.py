"""Documents about delivery: what is refused, in which words; secrets are never repeated."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.errors import ConfigError
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.load import load_documents
from sla_server.events.documents import RECIPIENT_KINDS, RecipientDocument, RouteDocument, without_secrets
from sla_server.events.recipients.build import TIMEOUT_S, RecipientBuilder

SPECS: dict[str, str] = {
    "webhook": "webhook: {url: 'https://a.example/x', secret_file: key}",
    "alertmanager": "alertmanager: {url: 'http://am.example:9093', holds: 7d}",
    "smtp": "smtp: {server: mail.example, sender: a@b.example, to: [c@d.example], user: u, password_file: p}",
    "syslog": "syslog: {server: '::1', tls: true, ca_file: ca.pem}",
    "file": "file: {path: out.jsonl, rotate_mb: 10, keep: 3}",
    "inbox": "inbox: {}",
    "command": "command: {argv: [page, --now]}",
    "apprise": "apprise: {url_file: chat}",
    "heartbeat": "heartbeat: {url_file: ping, interval: 30s}",
}


def _text(spec: str, kind: str = "Recipient") -> str:
    return f"apiVersion: storage-sla/v1\nkind: {kind}\nmetadata: {{name: oncall}}\nspec: {{{spec}}}\n"


def _problem(spec: str, kind: str = "Recipient") -> DocumentProblem:
    with pytest.raises(AgreementsRefused) as caught:
        load_documents(_text(spec, kind), 60)
    (problem,) = caught.value.problems
    return problem


def _builder(tmp_path: Any) -> RecipientBuilder:
    return RecipientBuilder(tmp_path / "s", tmp_path / "c", tmp_path / "f")


@pytest.mark.parametrize("kind", RECIPIENT_KINDS)
def test_each_kind_is_read_stored_and_built(kind: str, tmp_path: Any) -> None:
    document = load_documents(_text(SPECS[kind]), 60)[0].document
    assert isinstance(document, RecipientDocument)
    stored = document.spec_json()
    assert RecipientDocument.from_json(stored) == document
    made = _builder(tmp_path)("oncall", stored["spec"])
    assert (made.name, made.kind, made.most_notices) == ("oncall", kind, 100)
    assert made.timeout_s >= TIMEOUT_S
    assert list(tmp_path.iterdir()) == []  # nothing is opened or made yet
    made.close()


def test_a_recipient_does_not_fall_back_to_itself_and_a_heartbeat_to_none() -> None:
    problem = _problem("inbox: {}, fallback: [mail, oncall]")
    assert (problem.field, problem.problem) == ("spec.fallback", "oncall cannot take the place of itself")
    problem = _problem("heartbeat: {url_file: ping}, fallback: [mail]")
    assert (problem.field, problem.problem) == ("spec.fallback", "a heartbeat takes no events")


def test_timeout_and_batch_are_the_documents(tmp_path: Any) -> None:
    made = _builder(tmp_path)("a", {"inbox": {}, "timeout": "3m", "batch": 7})
    assert (made.timeout_s, made.most_notices) == (180.0, 7)


@pytest.mark.parametrize(
    ("spec", "field", "problem"),
    [
        ("batch: 5", "spec", "the kind of recipient is missing"),
        ("inbox: {}, file: {path: a}", "spec", "file and inbox are given"),
        ("file: {path: ../a}", "spec.file.path", "'../a' is not the name of a file"),
        ("file: {path: x.jsonl.1}", "spec.file.path", "'x.jsonl.1' is a name that renamed files get"),
        ("command: {argv: [/bin/sh]}", "spec.command.argv[0]", "'/bin/sh' is not the name of a program"),
        ("inbox: {}, timeout: 2h", "spec.timeout", "is longer than 3600 s"),
        ("webhook: {url: 'ftp://a'}", "spec.webhook.url", "neither http:// nor https://"),
        (
            "webhook: {url: 'http://a.example', bearer_file: token}",
            "spec.webhook.url",
            "bearer_file: a token is not sent in clear over http",
        ),
        (
            "heartbeat: {url: 'http://127.0.0.1.a.example', bearer_file: token}",
            "spec.heartbeat.url",
            "bearer_file: a token is not sent in clear over http",
        ),
        (
            "webhook: {url: 'http://a.example', headers: {Content-Length: '3'}}",
            "spec.webhook.headers",
            "the header Content-Length is set by the server",
        ),
        (
            "webhook: {url: 'http://a.example', headers: {X-Site: ' a'}}",
            "spec.webhook.headers",
            "the value of X-Site begins or ends with a blank",
        ),
        ("webhook: {}", "spec.webhook", "exactly one of 'url' and 'url_file'"),
        ("syslog: {unix: log}", "spec.syslog.unix", "'log' is not the path of a socket"),
        ("smtp: {server: 'a b', sender: a@b, to: [c@d]}", "spec.smtp.server", "'a b' is not a host"),
    ],
)
def test_a_mistake_is_said_at_its_field(spec: str, field: str, problem: str) -> None:
    found = _problem(spec)
    assert found.field == field
    assert problem in found.problem
    assert found.fix


@pytest.mark.parametrize(
    "spec",
    [
        "webhook: {url: 'https://user:geheim@a.example/'}",
        "webhook: {url: 'https://hooks.slack.com/services/geheim'}",
        "webhook: {url: 'https://a.example', secret: geheim}",
        "webhook: {url: 'https://a.example', api_key: geheim}",
        "webhook: {url: 'https://a.example', headers: {Authorization: 'Bearer geheim'}}",
        "webhook: {url: 'https://a.example', headers: {X-Api-Key: geheim}}",
        "smtp: {server: a, sender: a@b.example, to: [c@d.example], user: u, password: geheim}",
        "inbox: {}, token: geheim",
    ],
)
def test_a_secret_in_a_document_is_refused_and_not_repeated(spec: str, tmp_path: Any) -> None:
    found = _problem(spec)
    assert "geheim" not in str(found)
    assert "file" in found.fix
    with pytest.raises(ConfigError) as caught:
        _builder(tmp_path)("oncall", load_plain(spec))
    assert "geheim" not in str(caught.value)


def load_plain(spec: str) -> dict[str, Any]:
    from ruamel.yaml import YAML  # the reader of documents, without their models

    found: dict[str, Any] = YAML(typ="safe", pure=True).load(f"{{{spec}}}")
    return found


def test_a_password_is_not_sent_without_tls() -> None:
    found = _problem(SPECS["smtp"].replace("smtp: {", "smtp: {security: none, "))
    assert (found.field, found.problem) == ("spec.smtp.security", "a password is not sent without TLS")


@pytest.mark.parametrize(
    ("kind", "spec", "field"),
    [
        ("Route", "recipients: []", "spec.recipients"),
        ("Route", "recipients: [a], group_wait: 5s", "spec.group_wait"),
        ("Route", "recipients: [a], match: {severities: [fatal]}", "spec.match.severities[0]"),
        ("Route", "recipients: [a], match: {colour: [red]}", "spec.match.colour"),
        ("Silence", "start: 2026-01-01T00:00, reason: a", "spec"),
        ("Silence", "start: 2026-01-01T00:00, duration: 401d, reason: a", "spec.duration"),
    ],
)
def test_routes_and_silences_are_checked(kind: str, spec: str, field: str) -> None:
    assert _problem(spec, kind).field == field


@pytest.mark.parametrize(
    "host", ["https://a.example", "http://127.0.0.9:1", "http://[::1]", "http://localhost"]
)
def test_a_token_goes_over_https_or_to_this_host(host: str) -> None:
    assert load_documents(_text(f"webhook: {{url: '{host}/x', bearer_file: token}}"), 60)


@pytest.mark.parametrize(
    "query",
    [
        "token=geheim",
        "a=b&access_token=geheim",
        "accessToken=geheim",
        "key=geheim",
        "api-key=geheim",
        "sig=geheim&b=1",
        "code=geheim",
        "a=1;X%2DKey=geheim",
        "token=***",
    ],
)
@pytest.mark.parametrize("kind", ["webhook", "alertmanager", "heartbeat"])
def test_a_secret_in_the_query_of_an_address_is_refused(kind: str, query: str) -> None:
    found = _problem(f"{kind}: {{url: 'https://a.example/hook?{query}'}}")
    assert found.field == f"spec.{kind}.url"
    assert "of the address is a secret" in found.problem
    assert "geheim" not in str(found)
    assert "url_file" in found.fix


def test_a_query_without_a_secret_is_taken() -> None:
    assert load_documents(_text("webhook: {url: 'https://a.example/?team=storage&monkey=1&tokens'}"), 60)


def test_an_address_that_an_earlier_release_took_works_on_and_is_shown_without_its_secret(
    tmp_path: Any,
) -> None:
    url = "https://a.example/hook?team=storage&token=geheim%21x&v=1"
    (loaded,) = load_documents(_text("webhook: {url: 'https://a.example/hook'}"), 60)
    stored = loaded.document.spec_json()
    stored["spec"]["webhook"]["url"] = url
    assert RecipientDocument.from_json(stored).spec.webhook is not None
    _builder(tmp_path)("oncall", stored["spec"]).close()
    shown = without_secrets({"spec": stored, "document": f"url: {url}\nsecret_file: key\n", "n": [1, None]})
    assert "geheim" not in str(shown)
    assert shown["spec"]["spec"]["webhook"]["url"] == "https://a.example/hook?team=storage&token=***&v=1"
    assert shown["document"].endswith("token=***&v=1\nsecret_file: key\n")
    assert shown["n"] == [1, None]


def test_a_subject_is_matched_as_events_show_it() -> None:
    (loaded,) = load_documents(
        _text("recipients: [a], match: {subjects: ['erp-gold/*', 'node 1:7']}", "Route"), 60
    )
    assert isinstance(loaded.document, RouteDocument)
    assert loaded.document.spec.match.subjects == ["erp-gold/*", "node 1:7"]
    assert _problem("recipients: [a], match: {subjects: [' a']}", "Route").field == "spec.match.subjects[0]"
