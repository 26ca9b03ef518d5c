"""Headers of callers, and what errors of the engine mean."""

from __future__ import annotations

import nats.errors
import nats.js.errors
import pytest

from sla_server.cluster.messages.batch import is_repeated
from sla_server.cluster.messages.errors import BadSettings
from sla_server.cluster.messages.link import Trouble, classify
from sla_server.cluster.messages.producer import checked_headers


def test_headers() -> None:
    assert checked_headers(None) == {}
    assert checked_headers({"Kind": "x"}) == {"Kind": "x"}
    for bad in ({"Nats-Msg-Id": "1"}, {"sla-reason": "x"}, {"a": "b\nc"}, {"": "x"}):
        with pytest.raises(BadSettings, match="headers"):
            checked_headers(bad)


def test_errors_of_the_engine() -> None:
    def refused(code: int, err_code: int, text: str) -> nats.js.errors.APIError:
        return nats.js.errors.APIError(code=code, err_code=err_code, description=text)

    assert classify(refused(503, 10077, "maximum bytes exceeded")) is Trouble.FULL
    assert classify(refused(503, 10077, "raft: could not store entry")) is Trouble.TRANSIENT
    assert classify(refused(503, 10008, "no suitable peers")) is Trouble.TRANSIENT
    assert classify(refused(400, 10065, "subjects overlap")) is Trouble.FINAL
    assert classify(nats.errors.NoRespondersError()) is Trouble.TRANSIENT
    assert classify(TimeoutError()) is Trouble.TRANSIENT
    assert classify(nats.errors.MaxPayloadError()) is Trouble.FINAL
    assert is_repeated(refused(400, 10201, "duplicate"))
    assert not is_repeated(TimeoutError())
