"""The listener against real sockets: what a webhook recipient sends, what a hostile peer sends, TLS."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from pmdaemon.diskqueue.errors import QueuePoisoned
from pmdaemon.runtime.clock import Deadline, SystemClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events.queue import QueuedEvent
from sla_server.events.receiver import listener as listening
from sla_server.events.receiver.handler import PostHandler, PostLimits
from sla_server.events.receiver.listener import EventListener, ListenerFiles
from sla_server.events.recipients.base import CONFIRMED, Outcome
from sla_server.events.recipients.build import RecipientBuilder
from sla_server.events.recipients.webhook import body, signature
from tests.support.delivery_process import until
from tests.support.nbd_certificates import NbdAuthority
from tests.support.notices import notice

LIMIT_S = 120.0
PLACES = 4
MANY = 16
MOST_BYTES = 100_000


class Listening:
    """A listener whose events end in ``taken``."""

    def __init__(
        self, folder: Path, files: ListenerFiles | None = None, rate: float = 1000.0, places: int = MANY
    ) -> None:
        folder.chmod(0o700)
        (folder / "key").write_text("shared")
        (folder / "key").chmod(0o600)
        self.folder = folder
        self.taken: list[str] = []
        self.stop = Stop()
        self.threads = ThreadGroup()
        limits = PostLimits(MOST_BYTES, rate)
        handler = PostHandler(
            {"site-a": folder / "key"}, limits, self.accept, lambda _items: True, SystemClock()
        )
        self.handler = handler
        self.listener = EventListener("listen", ("127.0.0.1", 0), handler, files, places)
        self.port = self.listener.port
        self.listener.start(self.threads, self.stop)

    def accept(self, items: Sequence[QueuedEvent]) -> int:
        self.taken += [item.identity for item in items]
        return len(items)

    def close(self) -> None:
        self.stop.set()
        self.threads.join(LIMIT_S)
        self.listener.close()
        assert self.threads.failed is None

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)

    def recipient(self, scheme: str = "http", **more: Any) -> Any:
        url = f"{scheme}://localhost:{self.port}/events/site-a"
        spec = {"webhook": {"url": url, "secret_file": "key", **more}, "timeout": "50s"}
        return RecipientBuilder(self.folder, self.folder, self.folder)("relay", spec)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Listening]:
    made = Listening(tmp_path)
    yield made
    made.close()


def request(content: bytes, path: str = "/events/site-a", **headers: str) -> bytes:
    fields = {
        "Host": "relay",
        "Content-Length": str(len(content)),
        "Sla-Signature": signature("shared", int(time.time()), content),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def content_of(*numbers: int) -> bytes:
    return json.dumps(body("relay", [notice(number) for number in numbers])).encode()


def answer_of(sock: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response.status, response.read()


def test_a_relay_with_a_thousand_open_files_still_takes_events(rig: Listening) -> None:
    """``select`` knows no descriptor above 1023, and a relay's many recipients have a connection each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this user may not have so many files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    many = [os.dup(rig.stop.fileno()) for _ in range(1024)]
    try:
        with rig.connect() as sock:
            assert sock.fileno() > 1023
            sock.sendall(request(content := content_of(1)) + content)
            assert answer_of(sock) == (200, b"confirmed\n")
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(rig.taken) == 1


def test_a_defect_of_ours_ends_the_connection_that_met_it(
    rig: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of(1)
    with monkeypatch.context() as patch, rig.connect() as sock:
        patch.setattr(rig.handler, "_accept", [].pop)
        sock.sendall(request(content) + content)
        assert sock.recv(1) == b""
    with rig.connect() as sock:
        sock.sendall(request(content) + content)
        assert answer_of(sock)[0] == 200
    assert len(rig.taken) == 1


class OutOfDescriptors:
    """A listener that a peer waits at, and for which there is no descriptor."""

    def __init__(self, waiting: socket.socket) -> None:
        self.fileno = waiting.fileno

    def accept(self) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class CountedStop(Stop):
    """Set by the third wait, which it does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        self.waits.append(timeout_s or 0.0)
        if len(self.waits) == 3:
            self.set("the test ends")
        return self.is_set()


def test_without_descriptors_the_listener_rests(rig: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer waits on, so that the socket is readable all the time."""
    rig.stop.set("no other thread takes it")
    rig.threads.join(LIMIT_S)
    stop = CountedStop()
    with rig.connect():
        monkeypatch.setattr(rig.listener, "_listener", OutOfDescriptors(rig.listener._listener))
        rig.listener._run(stop)
        monkeypatch.undo()
    assert len(stop.waits) == 3
    assert min(stop.waits) > 0.5


def test_a_disk_that_fails_ends_the_thread(rig: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it, by the owner's policy, the process: it is started again with its queues opened again."""

    def accept(_items: Sequence[QueuedEvent]) -> int:
        raise QueuePoisoned("main", "EIO")

    content = content_of(1)
    monkeypatch.setattr(rig.handler, "_accept", accept)
    with rig.connect() as sock:
        sock.sendall(request(content) + content)
        assert sock.recv(1) == b""
    until(lambda: rig.threads.failed is not None, "the thread has died")
    failed, rig.threads._failure = rig.threads.failed, None  # expected here, and nowhere else
    assert failed is not None
    assert isinstance(failed[1], QueuePoisoned)


def test_a_webhook_recipient_delivers_over_one_connection(rig: Listening) -> None:
    recipient = rig.recipient()
    for number in range(1, 6):
        assert recipient.deliver([notice(number)], Deadline(LIMIT_S)) == CONFIRMED
    recipient.close()
    assert rig.taken == [f"event-{number}" for number in range(1, 6)]
    assert rig.handler.figures()["answers"] == {"200": 5}


def test_a_webhook_recipient_waits_where_its_secret_is_wrong_and_gives_up_what_is_too_large(
    rig: Listening,
) -> None:
    recipient = rig.recipient()
    (rig.folder / "key").write_text("shared")
    huge = [notice(number, event_fields={"text": "x" * 2000}) for number in range(60)]
    answer = recipient.deliver(huge, Deadline(LIMIT_S))
    assert (answer.outcome, "HTTP 413" in answer.reason) == (Outcome.REFUSED, True)
    assert recipient.deliver(huge[:1], Deadline(LIMIT_S)) == CONFIRMED
    wrong = RecipientBuilder(rig.folder, rig.folder, rig.folder)(
        "relay", {"webhook": {"url": f"http://127.0.0.1:{rig.port}/events/site-b", "secret_file": "key"}}
    )
    answer = wrong.deliver([notice(7)], Deadline(LIMIT_S))
    assert (answer.outcome, "HTTP 401" in answer.reason) == (Outcome.RETRY, True)
    assert rig.taken == ["event-0"]
    recipient.close()
    wrong.close()


def test_an_oversized_body_is_refused_by_its_length_and_the_peer_reads_why(rig: Listening) -> None:
    content = b"x" * (MOST_BYTES + 1)
    with rig.connect() as sock:
        sock.sendall(request(content) + content)
        status, text = answer_of(sock)
    assert (status, b"max_body_bytes here is 100000" in text, rig.taken) == (413, True, [])


def test_a_body_without_its_length_is_refused(rig: Listening) -> None:
    with rig.connect() as sock:
        sock.sendall(request(b"", Content_Length="", Transfer_Encoding="chunked"))
        assert answer_of(sock)[0] == 411
    assert rig.taken == []


def test_what_is_no_http_is_answered_and_closed(rig: Listening) -> None:
    for sent in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"\r\n" * 10, b"GET / HTTP/1.1\r\n\r\n"):
        with rig.connect() as sock:
            sock.sendall(sent)
            assert answer_of(sock)[0] == 400
    with rig.connect() as sock:
        sock.sendall(b"POST /events/site-a HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000)
        assert answer_of(sock)[0] == 431
    assert rig.taken == []


def test_curl_gets_leave_to_send_a_body_that_was_admitted(rig: Listening) -> None:
    content = content_of(1)
    with rig.connect() as sock:
        sock.sendall(request(content, Expect="100-continue"))
        assert sock.recv(25) == b"HTTP/1.1 100 \r\n\r\n"
        sock.sendall(content)
        assert answer_of(sock)[0] == 200
    assert rig.taken == ["event-1"]


def test_two_requests_sent_at_once_are_answered_one_after_the_other(rig: Listening) -> None:
    with rig.connect() as sock:
        sock.sendall(b"".join(request(each) + each for each in (content_of(1), content_of(2))))
        found = b""
        while found.count(b"confirmed\n") < 2:
            found += sock.recv(1000)
    assert found.count(b"HTTP/1.1 200 ") == 2
    assert rig.taken == ["event-1", "event-2"]


def test_a_peer_that_is_late_is_closed(rig: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "REQUEST_S", 0.2)
    for sent in (b"", b"POST /events/site-a HTTP/1.1\r\n", request(content_of(1))):
        # A reset is the end, too: of one who was closed before all that he had sent was read.
        with rig.connect() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(sent)
            assert sock.recv(100) == b""
    assert rig.taken == []


def test_one_host_has_half_of_the_places(tmp_path: Path) -> None:
    rig = Listening(tmp_path, places=PLACES)
    silent = [rig.connect() for _ in range(PLACES)]
    closed = 0
    deadline = Deadline(LIMIT_S)
    while closed < PLACES // 2 and not deadline.passed:
        closed = 0
        for sock in silent:
            sock.settimeout(0.01)
            try:
                closed += sock.recv(1) == b""
            except TimeoutError:
                continue
    assert closed == PLACES // 2
    for sock in silent:
        sock.close()
    recipient = rig.recipient()
    assert retried(recipient)
    recipient.close()
    rig.close()


def retried(recipient: Any) -> bool:
    """The places of connections that were closed just now are free a moment later."""
    deadline = Deadline(LIMIT_S)
    while not deadline.passed:
        if recipient.deliver([notice(1)], Deadline(LIMIT_S)) == CONFIRMED:
            return True
    return False


def test_a_host_above_its_rate_is_asked_to_come_again(tmp_path: Path) -> None:
    rig = Listening(tmp_path, rate=1.0)
    recipient = rig.recipient()
    found = [recipient.deliver([notice(number)], Deadline(LIMIT_S)) for number in range(20)]
    waits = [each.after_s for each in found if each != CONFIRMED]
    recipient.close()
    rig.close()
    assert waits
    assert set(waits) == {1.0}
    assert len(rig.taken) == 20 - len(waits)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> NbdAuthority:
    return NbdAuthority(tmp_path_factory.mktemp("tls"))


def put(authority: NbdAuthority, name: str, here: Path) -> ListenerFiles:
    """A new certificate at this place, and its authority beside it."""
    made = authority.issue("server", name, "localhost")
    for source, target in (
        ("server-cert.pem", "relay.pem"),
        ("server-key.pem", "relay.key"),
        ("ca-cert.pem", "ca.pem"),
    ):
        (here / target).write_bytes((made / source).read_bytes())
    return ListenerFiles(here / "relay.pem", here / "relay.key")


def test_tls_by_certificate_files(tmp_path: Path, authority: NbdAuthority) -> None:
    rig = Listening(tmp_path, put(authority, "one", tmp_path))
    recipient = rig.recipient("https", ca_file="ca.pem")
    assert recipient.deliver([notice(1)], Deadline(LIMIT_S)) == CONFIRMED
    assert recipient.deliver([notice(2)], Deadline(LIMIT_S)) == CONFIRMED
    with rig.connect() as sock:  # plain HTTP there: closed, and nothing else happens
        sock.sendall(request(content_of(3)) + content_of(3))
        with contextlib.suppress(ConnectionResetError):
            assert not sock.recv(3).startswith(b"HTT")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with rig.connect() as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)
    recipient.close()
    rig.close()
    assert rig.taken == ["event-1", "event-2"]


def test_a_new_certificate_counts_for_the_next_connection(tmp_path: Path, authority: NbdAuthority) -> None:
    rig = Listening(tmp_path, put(authority, "first", tmp_path))
    good = (tmp_path / "relay.pem").read_bytes()
    (tmp_path / "relay.pem").write_bytes(b"nothing")
    recipient = rig.recipient("https", ca_file="ca.pem")
    assert recipient.deliver([notice(1)], Deadline(LIMIT_S)) == CONFIRMED  # the one before is used on
    assert serial_of(rig.port) == serial(good)
    recipient.close()
    put(authority, "second", tmp_path)
    assert serial_of(rig.port) == serial((tmp_path / "relay.pem").read_bytes()) != serial(good)
    rig.close()


def serial(pem: bytes) -> int:
    return x509.load_pem_x509_certificate(pem).serial_number


def serial_of(port: int) -> int:
    """Of the certificate that a new connection gets."""
    return serial(ssl.get_server_certificate(("127.0.0.1", port), timeout=LIMIT_S).encode())


def test_a_stop_ends_threads_that_wait_for_peers(tmp_path: Path) -> None:
    rig = Listening(tmp_path)
    sockets = [rig.connect() for _ in range(2)]
    rig.stop.set()
    rig.threads.join(LIMIT_S)
    rig.listener.close()
    for sock in sockets:
        sock.close()
    assert rig.threads.failed is None
