"""The threshold set that outlives the link."""

from gateway_agent.link.caps import ThresholdStore
from pmdaemon.wire.messages.agent import Thresholds


def test_thresholds_survive_and_a_broken_file_is_begun_anew(tmp_path):
    path = tmp_path / "thresholds.json"
    entry = {"volume": "v", "client": "*", "io": "any", "threshold_us": 9}
    ThresholdStore(path).replace(Thresholds(4, (entry,)))
    assert ThresholdStore(path).current == Thresholds(4, (entry,))
    path.write_text('{"version": "x"}')
    assert ThresholdStore(path).current is None
