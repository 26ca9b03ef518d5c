"""Several servers named at once: the one that acts is asked."""

from __future__ import annotations

import httpx
import pytest

from sla_server.cli.client import Client
from sla_server.cli.errors import ServerDown

ADDRESSES = "https://a:8411, https://b:8411,https://c:8411"


def _client(states: dict[str, int], asked: list[tuple[str, str, str]]) -> Client:
    """``states``: host to the status of its ``/ready``; a host that is not in it does not answer."""

    def answer(request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path.removeprefix("/api/v1")
        asked.append((host, path, request.headers.get("Authorization", "")))
        if host not in states:
            raise httpx.ConnectError("refused", request=request)
        if path == "/ready":
            return httpx.Response(states[host], json={"ready": states[host] == 200, "waits_for": []})
        return httpx.Response(200, json={"host": host})

    client = Client.find(ADDRESSES, None, None)
    client.transport = httpx.MockTransport(answer)
    return client


@pytest.mark.parametrize(
    ("states", "host", "tried"),
    [
        ({"a": 200, "b": 503, "c": 503}, "a", "a"),
        ({"a": 503, "b": 200}, "b", "ab"),
        ({"c": 200}, "c", "abc"),
        ({"b": 503, "c": 503}, "b", "abc"),  # none acts: what is stored can be read
    ],
)
def test_the_server_that_acts_is_asked(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, int], host: str, tried: str
) -> None:
    monkeypatch.setenv("SLA_TOKEN", "secret")
    asked: list[tuple[str, str, str]] = []
    client = _client(states, asked)
    assert client.change("PUT", "/mode", json={"mode": "observe"}) == {"host": host}
    assert client.get("/mode") == {"host": host}
    client.close()
    ready = [(name, "/ready", "") for name in tried]
    assert asked == [*ready, (host, "/mode", "Bearer secret"), (host, "/mode", "")]


def test_that_none_answers_names_all_of_them() -> None:
    client = _client({}, [])
    with pytest.raises(
        ServerDown, match="no SLA server answers at https://a:8411, https://b:8411, https://c"
    ):
        client.get("/mode")


def test_one_server_is_not_asked_whether_it_acts() -> None:
    assert Client.find("a:8411", None, None).others == ()
    assert Client.find("a:8411,", None, None).server == "http://a:8411"
