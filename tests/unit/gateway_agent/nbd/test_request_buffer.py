import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.request_buffer import COOKIE, END, RequestBuffer


def put(intake, data, now_ns=0):
    """Give bytes to the intake as far as there is room; returns (bytes taken, reads and writes)."""
    room = intake.room()
    count = min(len(data), len(room))
    room[:count] = data[:count]
    return count, intake.received(count, now_ns)


def write(cookie, payload):
    return p.request(p.Cmd.WRITE, cookie, 0, len(payload)) + payload


def admit(intake):
    request = intake.queue.popleft()
    intake.admit_pos = request[END]
    return request


def test_a_payload_that_ends_exactly_at_the_end_of_the_buffer_with_an_empty_queue_goes_out():
    intake = RequestBuffer("client", 4096)
    data = write(7, bytes(range(256)) * 15 + bytes(4096 - 28 - 3840))
    assert len(data) == 4096
    assert put(intake, data[:28])[0] == 28
    admit(intake)
    assert put(intake, data[28:])[0] == 4068
    assert not intake.queue
    assert bytes(intake.outgoing()) == data
    intake.sent(4096)
    assert intake.is_drained
    assert len(intake.room()) == 4096


def test_a_payload_larger_than_the_buffer_streams_through():
    intake, data, out = RequestBuffer("client", 1024), write(1, bytes(range(250)) * 40), bytearray()
    left = data
    while left:
        count, _ = put(intake, left)
        assert count, "a full buffer that nobody empties"
        left = left[count:]
        if intake.queue:
            admit(intake)
        view = intake.outgoing()
        out += view
        intake.sent(len(view))
    assert bytes(out) == data
    assert intake.is_drained


def test_held_requests_stay_and_a_full_buffer_stops_reading():
    intake = RequestBuffer("client", 280)
    taken, transfers = put(intake, b"".join(p.request(p.Cmd.READ, n, 0, 512) for n in range(20)))
    assert (taken, transfers) == (280, 10)
    assert not intake.wants_input
    assert not intake.room()
    assert not intake.outgoing()
    assert admit(intake)[COOKIE] == 0
    assert len(intake.outgoing()) == 28
    intake.sent(28)
    assert intake.wants_input
    assert len(intake.room()) == 28


def test_a_skipped_write_drops_the_payload_that_is_here_and_the_rest_on_its_way():
    intake = RequestBuffer("client", 256)
    data = write(1, bytes(1000)) + p.request(p.Cmd.READ, 2, 0, 4)
    count, _ = put(intake, data)
    intake.skip(intake.queue.popleft())
    while count < len(data):
        taken, _ = put(intake, data[count:])
        assert taken
        count += taken
        if not intake.queue:
            assert not intake.outgoing()
    assert admit(intake)[COOKIE] == 2
    assert bytes(intake.outgoing()) == data[-28:]


def test_a_refused_request_may_not_overtake_an_admitted_one():
    intake = RequestBuffer("client")
    put(intake, p.request(0, 1, 0, 4) + p.request(0, 2, 0, 4))
    admit(intake)
    with pytest.raises(AssertionError):
        intake.skip(intake.queue[0])


def test_nothing_behind_disc_is_looked_at():
    intake = RequestBuffer("client")
    put(intake, p.request(p.Cmd.READ, 1, 0, 4) + p.request(p.Cmd.DISC, 0, 0, 0) + b"rubbish" * 9)
    assert intake.disconnecting
    assert len(intake.queue) == 1
    assert not intake.wants_input


def test_arrival_is_stamped_and_transfers_are_counted():
    intake = RequestBuffer("client")
    _, transfers = put(
        intake, p.request(0, 1, 0, 4) + p.request(p.Cmd.FLUSH, 2, 0, 0) + write(3, b"abcd"), 99
    )
    assert transfers == 2
    assert [request[0] for request in intake.queue] == [99, 99, 99]


@pytest.mark.parametrize("data", [b"\0" * 28, p.request(p.Cmd.WRITE, 1, 0, (32 << 20) + 1)])
def test_what_is_no_request_is_refused(data):
    with pytest.raises(NbdProtocolError):
        put(RequestBuffer("client"), data)


ops = st.lists(st.one_of(st.none(), st.binary(max_size=700)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(ops=ops, seed=st.integers(0, 1 << 32))
def test_whatever_the_sizes_of_receives_and_sends_the_bytes_come_out_as_they_went_in(ops, seed):
    dice = random.Random(seed)
    data = b"".join(
        p.request(p.Cmd.READ, n, 0, 512) if payload is None else write(n, payload)
        for n, payload in enumerate(ops)
    )
    intake, out, left, cookies = RequestBuffer("client", 256), bytearray(), data, []
    for _ in range(20_000):
        if len(out) == len(data):
            break
        count, _ = put(intake, left[: dice.randint(1, 300)]) if left else (0, 0)
        left = left[count:]
        while intake.queue and dice.random() < 0.7:
            cookies.append(admit(intake)[COOKIE])
        view = intake.outgoing()
        sent = dice.randint(0, len(view))
        out += view[:sent]
        intake.sent(sent)
    assert bytes(out) == data
    assert cookies == list(range(len(ops)))
