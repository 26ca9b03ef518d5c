"""Accounts: roles compiled to subjects, secrets sealed, refusals that name destination and role."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.pki.authority import Authority
from sla_server.cluster import access, account_file, accounts
from sla_server.cluster.accounts import Account
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import BadAccount, BadInvitation
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Destination
from sla_server.cluster.messages.errors import AccessDenied, BadSelector
from sla_server.cluster.server_conf import Secrets

OWN = Secrets("s", "p", "r")
ORDERS, BILLS, SHARED = (
    Destination("orders.eu"),
    Destination("bills"),
    Destination("orders.us", domain="orders"),
)
ALL = [ORDERS, BILLS, SHARED]


def _publish(*roles: str) -> set[str]:
    return set(accounts.permissions(Account("shop", roles, ""), ALL)[0])


def test_a_producer_may_send_to_what_its_selector_matches_and_to_nothing_else() -> None:
    allowed = _publish("producer:orders.*")
    assert {ORDERS.subject, SHARED.subject} <= allowed
    assert BILLS.subject not in allowed
    assert not [subject for subject in allowed if "CONSUMER" in subject or subject.startswith("sla.d.__")]


@pytest.mark.parametrize("role", ["producer:>", "producer:glob:*", "producer:regex:.*", "consumer:>"])
def test_a_role_for_everything_does_not_reach_commands_or_the_log(role: str) -> None:
    everything = [*ALL, Destination("_DMQ"), Destination("_ADMIN"), Destination("_LOG")]
    allowed, _ = accounts.permissions(Account("shop", (role,), ""), everything)
    assert not [subject for subject in allowed if subject.startswith(("sla.d.__ADMIN", "sla.d.__LOG", ">"))]


def test_a_consumer_may_receive_and_store_dead_messages_but_not_send() -> None:
    allowed = _publish("consumer:orders.eu")
    assert f"$JS.API.CONSUMER.MSG.NEXT.{ORDERS.stream}.*" in allowed
    assert f"$JS.ACK.{ORDERS.stream}.>" in allowed
    assert f"$JS.API.STREAM.INFO.{ORDERS.stream}" in allowed  # whether a mirror was promoted
    assert names.subject("_DMQ", "_DMQ") in allowed
    # Who makes a stream may have the engine copy any other into it, and send that on.
    assert not [subject for subject in allowed if "STREAM.CREATE" in subject or subject.startswith("$KV.")]
    assert ORDERS.subject not in allowed
    assert not [subject for subject in allowed if BILLS.stream in subject.split(".")]


def test_a_monitor_sees_no_content() -> None:
    allowed = _publish("monitor")
    assert "$JS.API.STREAM.INFO.*" in allowed
    contents = [subject for subject in allowed if ".GET." in subject or "MSG.NEXT" in subject]
    assert {token for subject in contents for token in subject.split(".") if "SLA" in token} == {
        "KV_SLA_DESTINATIONS",
        "KV_SLA_MIRRORS",  # figures, and where consumers are
        "SLA___LOG",
    }


def test_only_the_admin_may_do_everything() -> None:
    assert _publish("admin", "producer:bills") == {">"}


def test_answers_of_an_account_come_where_no_other_listens() -> None:
    _, subscribe = accounts.permissions(Account("shop", ("producer:>",), ""), ALL)
    assert subscribe == ["_INBOX_shop.>", "sla.announce"]


@pytest.mark.parametrize("name", ["", "Shop", "sla", "sys", "route", "a b", "1a", "x" * 33, "a.b", "a*"])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(BadAccount):
        accounts.check_name(name)


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ([], "an account has 1 to 32 roles"),
        (["root"], "'root' is no role; there are admin, monitor, producer:SELECTOR"),
        (["producer"], "'producer' is no role"),
        (["admin:x"], "'admin:x' is no role"),
        (["consumer:_ADMIN"], "reserved destinations"),
        (["producer:glob:_*"], "reserved destinations"),
    ],
)
def test_roles_that_cannot_be_are_refused(roles: list[str], why: str) -> None:
    with pytest.raises(BadAccount, match=why):
        accounts.check_roles("shop", roles)


def test_a_selector_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadSelector):
        accounts.check_roles("shop", ["producer:regex:("])


def test_a_secret_is_read_by_nodes_of_this_cluster_alone() -> None:
    sealed = accounts.seal("secret", OWN)
    assert "secret" not in sealed
    assert accounts.unseal(sealed, OWN) == "secret"
    for other, text in ((Secrets("s", "p", "other"), sealed), (OWN, "AAAA"), (OWN, "no base64!")):
        with pytest.raises(BadAccount):
            accounts.unseal(text, other)


def test_users_of_the_engine_have_secrets_and_what_they_may_do() -> None:
    good = Account("shop", ("producer:bills",), accounts.seal("x", OWN))
    bad = Account("old", ("admin",), "damaged")
    [user] = accounts.users([good, bad], ALL, OWN)
    assert (user.name, user.secret) == ("shop", "x")
    conf = user.as_conf()
    assert BILLS.subject in conf["permissions"]["publish"]["allow"]
    assert conf["permissions"]["subscribe"]["allow"][0] == "_INBOX_shop.>"


def test_accounts_come_back_from_their_document_without_those_of_a_later_release() -> None:
    good = Account("shop", ("monitor",), "x")
    body = {
        "shop": accounts.entry_of(good),
        "later": {"roles": ["auditor"], "sealed": "x"},
        "sla": accounts.entry_of(good),
        "none": 5,
        "selector": {"roles": ["producer:regex:("], "sealed": "x"},
        "token": {"roles": ["consumer:a b"], "sealed": "x"},
        "roles": {"roles": 7, "sealed": "x"},
    }
    assert accounts.accounts_of(body) == {"shop": good}


@pytest.mark.parametrize(
    ("subject", "role", "destination"),
    [
        (ORDERS.subject, "producer:orders.eu", "orders.eu"),
        ("sla.d.__ADMIN._ADMIN.all", "admin", "_ADMIN.all"),
        (f"$JS.API.CONSUMER.INFO.{ORDERS.stream}.x", "consumer:orders.eu", "orders.eu"),
        (f"sla.t.l.{ORDERS.stream}.queue-orders_deu.7", "consumer:orders.eu", "orders.eu"),
        ("$JS.API.CONSUMER.CREATE.SLA___LOG.x", "monitor", "_LOG"),
        ("$JS.API.STREAM.CREATE.SLA_a", "admin", ""),
    ],
)
def test_a_refusal_names_destination_and_role(subject: str, role: str, destination: str) -> None:
    said = f"nats: 'Permissions Violation for Publish to \"{subject}\"'"
    assert access.refused_subject(said.lower()) == subject.lower()
    assert access.needed(subject) == (role, destination)
    assert access.needed(access.refused_subject(said)) == (role.lower(), destination.lower())
    text = str(AccessDenied("shop", destination, role))
    assert destination in text
    assert role in text


def test_other_words_of_the_engine_are_no_refusal() -> None:
    assert access.refused_subject("nats: stale connection") == ""


@pytest.mark.parametrize("name", ["a.b_c", "_LOG", "a_d.d_", "__._"])
def test_a_stream_says_which_destination_it_has(name: str) -> None:
    assert access.decoded(names.encode(name)) == name


def test_the_file_of_an_account_says_where_and_as_whom_to_connect(tmp_path: Path) -> None:
    path = tmp_path / "shop.json"
    path.write_text(account_file.text(ClusterConfig(node="n1"), "shop", "secret", Authority(tmp_path)))
    path.chmod(0o644)
    with pytest.raises(BadInvitation, match="other users may read it"):
        account_file.connection(path)
    path.chmod(0o600)
    found = account_file.connection(path)
    assert (found.account, found.urls, found.tls) == ("shop", ("nats://shop:secret@127.0.0.1:4222",), None)
    path.write_text("{}")
    with pytest.raises(BadInvitation, match="is no file of an account"):
        account_file.connection(path)
