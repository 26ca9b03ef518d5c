"""What one agent can hold: exports and names."""

import pytest

from gateway_agent.config import (
    EXPORT_OVERHEAD_BYTES,
    MAX_EXPORT_BYTES,
    AgentConfig,
    ExportConfig,
    PlaneConfig,
)
from gateway_agent.nbd.plane import Plane
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import load
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind


@pytest.fixture
def agent(tmp_path):
    def made(name="gw-a", exports=1, volume="v", host="false"):
        path = tmp_path / "agent.toml"
        path.write_text(
            f'name = "{name}"\nstate_dir = "{tmp_path}/s"\nruntime_dir = "{tmp_path}/r"\n'
            f'[host]\nenabled = {host}\n[[plane]]\nname = "nbd-0"\nlisten = "unix:{tmp_path}/nbd.sock"\n'
            + "".join(
                f'[[export]]\nvolume = "{volume}{number}"\nbackend = "{volume}"\nfile = "/dev/zero"\n'
                for number in range(exports)
            )
        )
        return load(AgentConfig, path)

    return made


def test_exports_that_no_message_can_name_are_refused_at_the_start(agent):
    assert len(agent(exports=512).export) == 512
    with pytest.raises(ConfigError, match=r"513 .* 512 at most"):
        agent(exports=513)
    with pytest.raises(ConfigError, match="60000 that one message"):
        agent(exports=300, volume="n" * 100)


def test_a_name_too_long_for_volumes_of_the_host_is_refused(agent):
    assert agent(name="n" * 91).name
    assert agent(name="n" * 90, host="true").host.enabled
    with pytest.raises(ConfigError, match=r"91 characters; .* 90 at most"):
        agent(name="n" * 91, host="true")


def test_a_plane_with_all_its_exports_and_streams_can_say_hello(tmp_path):
    exports = [
        ExportConfig(volume=f"{number:022}", backend="b" * 25, file=str(tmp_path / "no"))
        for number in range(512)
    ]
    listen, control = f"unix:{tmp_path}/nbd.sock", f"{tmp_path}/control.sock"
    plane = Plane(PlaneConfig("nbd-0", [listen], control, exports))
    for export in exports[:320]:
        plane._cuts.table.get(export, "host-a", plane._cuts.thresholds)
    assert 512 * (EXPORT_OVERHEAD_BYTES + 47) <= MAX_EXPORT_BYTES, "the configuration allows this"
    assert frame.encode(Kind.DP_HELLO, plane.hello())
    plane.close()
