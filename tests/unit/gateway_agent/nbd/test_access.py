import ipaddress

import pytest

from gateway_agent.config import ExportConfig
from gateway_agent.nbd.access import ClientIdentity, names_of, why_refused
from gateway_agent.nbd.sockets import parse_network

FAR = ipaddress.ip_address("10.1.2.3")
SIX = ipaddress.ip_address("2001:db8::7")


def client(address=FAR, *names):
    return ClientIdentity("uid-0" if address is None else str(address), address, names)


def export(**more):
    return ExportConfig.model_validate({"volume": "v", "backend": "b", "file": "/x"} | more)


@pytest.mark.parametrize(
    ("settings", "who", "may"),
    [
        ({}, client(), True),
        ({}, client(None), True),
        ({"allow_networks": ["10.0.0.0/8"]}, client(), True),
        ({"allow_networks": ["10.1.2.3"]}, client(), True),
        ({"allow_networks": ["10.1.2.4", "192.0.2.0/24"]}, client(), False),
        ({"allow_networks": ["10.0.0.0/8"]}, client(SIX), False),
        ({"allow_networks": ["10.0.0.0/8", "2001:db8::/32"]}, client(SIX), True),
        ({"allow_networks": ["0.0.0.0/0", "::/0"]}, client(None), False),
        ({"allow_networks": ["unix"]}, client(None), True),
        ({"allow_networks": ["unix"]}, client(), False),
        ({"allow_names": ["db-1"]}, client(), False),
        ({"allow_names": ["db-1"]}, client(FAR, "web-1", "DB-1"), True),
        ({"allow_names": ["*.db.example"]}, client(FAR, "a.db.example"), True),
        ({"allow_names": ["*.db.example"]}, client(FAR, "a.db.example.evil"), False),
        ({"allow_names": ["db-1"], "allow_networks": ["10.0.0.0/8"]}, client(FAR, "db-1"), True),
        ({"allow_names": ["db-1"], "allow_networks": ["10.0.0.0/8"]}, client(SIX, "db-1"), False),
        ({"allow_names": ["db-1"], "allow_networks": ["10.0.0.0/8"]}, client(FAR, "db-2"), False),
    ],
)
def test_every_list_that_is_set_must_let_the_client_in(settings, who, may):
    reason = why_refused(export(**settings), who)
    assert (not reason) == may
    assert may or next(iter(key for key in settings if key in reason))


def test_the_names_of_a_certificate_and_which_one_comes_first():
    certificate = {
        "subject": ((("organizationName", "acme"),), (("commonName", "host a"),)),
        "subjectAltName": (
            ("URI", "spiffe://acme/db"),
            ("DNS", "a.example"),
            ("IP Address", "10.0.0.7"),
            ("URI", "urn:storage-sla:name:gw-7"),
            ("DNS", "a.example"),
        ),
    }
    assert names_of(certificate) == ("gw-7", "a.example", "host a", "10.0.0.7", "spiffe://acme/db")
    assert names_of({"subject": ((("commonName", ""),),)}) == names_of({}) == names_of(None) == ()


@pytest.mark.parametrize(
    ("rule", "names", "called"),
    [
        ("address", ("a.example",), "10.1.2.3"),
        ("export-suffix", ("a.example",), "10.1.2.3"),
        ("tls-name", ("a.example", "b"), "a.example"),
        ("tls-name", ("host a/\u00fc",), "host-a--"),
        ("tls-name", ("*.x",), "tls--.x"),
        ("tls-name", ("n" * 200,), "n" * 128),
        ("tls-name", (), "10.1.2.3"),
    ],
)
def test_what_a_client_is_called(rule, names, called):
    assert client(FAR, *names).called(rule) == called


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "10.0.0.0/33", "example.org", "unix"])
def test_what_is_no_network_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"write 10\.0\.0\.0/8"):
        parse_network(text)


def test_a_name_of_a_certificate_is_printable_in_the_log():
    odd = ClientIdentity("10.0.0.7", None, ("a\x1b[31m\x07", "b\n" * 5000))
    export = ExportConfig(volume="v", backend="b", file="/x", allow_names=("host-*",))
    for text in (str(odd), why_refused(export, odd)):
        assert text.isprintable()
        assert len(text) < 1000
