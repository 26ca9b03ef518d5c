"""Small files: identity, lock, book of streams, thresholds; and the backoff."""

import heapq
import random
import stat
from collections import Counter

import pytest

from gateway_agent.link import state_files, streams
from gateway_agent.link.backoff import Backoff
from gateway_agent.link.config import ReconnectConfig
from gateway_agent.link.errors import AlreadyRunning, StateFileBroken
from gateway_agent.link.streams import StreamNames
from gateway_agent.link.thresholds import ThresholdStore
from gateway_agent.sources.sample import StreamKey
from pmdaemon.wire.messages.agent import Thresholds
from pmdaemon.wire.names import stream_id
from tests.support.link import GATEWAY

KEY = StreamKey("vol-1", "c", "b0")


def announced(book: StreamNames) -> list[dict]:
    return [entry for message in book.announcements() for entry in message.header()["streams"]]


def test_identity_is_made_once_and_private(tmp_path):
    first = state_files.gateway_id(tmp_path)
    assert state_files.gateway_id(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "gateway_id").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gateway_id"]


def test_a_broken_identity_is_not_replaced_silently(tmp_path):
    (tmp_path / "gateway_id").write_text("nonsense")
    with pytest.raises(StateFileBroken, match="backup"):
        state_files.gateway_id(tmp_path)


@pytest.mark.parametrize("text", ["nonsense", "[" * 50_000])
def test_a_file_that_is_not_json_is_named(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(StateFileBroken, match=r"a\.json.*cannot be read.*restore it"):
        state_files.read_json(path, "restore it")


@pytest.mark.parametrize(
    ("name", "use"), [("gateway_id", state_files.gateway_id), ("agent.lock", state_files.lock_directory)]
)
def test_files_that_cannot_be_used_are_told_with_the_way_out(tmp_path, name, use):
    (tmp_path / name).mkdir()
    with pytest.raises(StateFileBroken, match=rf"{name}: cannot be used \(Is a directory\).*agent's user"):
        use(tmp_path)


def test_an_identity_that_is_no_text_is_told(tmp_path):
    (tmp_path / "gateway_id").write_bytes(b"\xff\xfe")
    with pytest.raises(StateFileBroken, match="is not a UUID"):
        state_files.gateway_id(tmp_path)


def test_a_second_agent_is_refused(tmp_path):
    held = state_files.lock_directory(tmp_path)
    with pytest.raises(AlreadyRunning, match="state_dir"):
        state_files.lock_directory(tmp_path)
    state_files.os.close(held)
    state_files.os.close(state_files.lock_directory(tmp_path))


def test_new_streams_are_told_once_a_session_and_survive_a_restart(tmp_path):
    book = StreamNames(GATEWAY, tmp_path / "streams.json")
    assert book.enter(KEY) == stream_id(GATEWAY, "vol-1", "c")
    book.save()
    assert announced(book) == [{"id": book.enter(KEY), "volume": "vol-1", "client": "c", "backend": "b0"}]
    assert announced(book) == []
    book.new_session()
    assert len(announced(book)) == 1
    assert len(announced(StreamNames(GATEWAY, tmp_path / "streams.json"))) == 1


def test_a_stream_that_moves_to_another_backend_is_told_again():
    book = StreamNames(GATEWAY, None)
    book.enter(KEY)
    announced(book)
    book.enter(KEY._replace(backend="b1"))
    assert [entry["backend"] for entry in announced(book)] == ["b1"]


def test_announcements_fit_their_frames():
    book = StreamNames(GATEWAY, None)
    for number in range(300):
        book.enter(KEY._replace(client=f"c{number}"))
    assert [len(message.streams) for message in book.announcements()] == [128, 128, 44]


def test_the_book_is_bounded(monkeypatch):
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    book = StreamNames(GATEWAY, None)
    for client in "abc":
        book.enter(KEY._replace(client=client))
    assert [entry["client"] for entry in announced(book)] == ["b", "c"]


def test_thresholds_survive_and_a_broken_file_is_begun_anew(tmp_path):
    path = tmp_path / "thresholds.json"
    entry = {"volume": "v", "client": "*", "io": "any", "threshold_us": 9}
    ThresholdStore(path).replace(Thresholds(4, (entry,)))
    assert ThresholdStore(path).current == Thresholds(4, (entry,))
    path.write_text('{"version": "x"}')
    assert ThresholdStore(path).current is None
    (tmp_path / "streams.json").write_text("[")
    assert announced(StreamNames(GATEWAY, tmp_path / "streams.json")) == []


def test_waits_double_to_their_limit_and_begin_again():
    backoff = Backoff(0.2, 1.0, 0.0, random.Random(1))
    assert [backoff.failed() for _ in range(4)] == [0.2, 0.4, 0.8, 1.0]
    backoff.succeeded()
    assert backoff.failed() == 0.2


def test_jitter_only_shortens():
    backoff = Backoff(1.0, 1.0, 0.3, random.Random(1))
    waits = [backoff.failed() for _ in range(50)]
    assert 0.7 <= min(waits) < max(waits) <= 1.0


def test_a_fleet_that_lost_its_server_at_once_returns_spread():
    """4,000 agents with the default waits, a server that takes 100 sessions a tenth of a second."""
    reconnect = ReconnectConfig()
    fleet = [
        Backoff(reconnect.first_s, reconnect.max_s, reconnect.jitter_ratio, random.Random(seed))
        for seed in range(4000)
    ]
    due = [(backoff.failed(), index) for index, backoff in enumerate(fleet)]
    heapq.heapify(due)
    attempts, served = Counter(), Counter()
    while due:
        at_s, index = heapq.heappop(due)
        tenth = int(at_s * 10)
        attempts[tenth] += 1
        if served[tenth] < 100:
            served[tenth] += 1
        else:
            heapq.heappush(due, (at_s + fleet[index].failed(), index))
    assert sum(served.values()) == 4000
    assert max(attempts.values()) < 800, "no instant sees more than a share of the fleet"
    assert max(served) < 100, "and ten seconds later all are back, where 4 s is the least possible"
    first_second = sum(count for tenth, count in attempts.items() if tenth < 10)
    assert first_second < 3 * 4000
