"""A reload tries to listen where new planes will, and leaves alone what is listened on already."""

import socket

import pytest

from gateway_agent.reload import ConfigFile, prepare
from tests.support.agent_files import Folder, refused


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path)
    made.write({"nbd-0": ["a"]})
    return made


def test_an_address_of_another_process_is_refused(folder):
    current = folder.config()
    folder.write({"nbd-0": ["a"], "nbd-1": ["b"]})
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder.path / "nbd-1"))
        other.listen()
        refused(folder, current, "another process is listening there")


def test_an_address_is_only_tried_and_what_is_listened_on_already_is_left_alone(folder):
    current = folder.config()
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(str(folder.path / "nbd-0"))
        mine.listen()
        folder.write({"nbd-0": ["a"], "nbd-1": ["b"]})
        prepare(ConfigFile(folder.file), current)
        assert (folder.path / "nbd-0").exists()
        assert not (folder.path / "nbd-1").exists()


def test_an_address_that_collides_with_one_of_ours_is_left_to_the_plane(folder):
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        old, new = f'"tcp:127.0.0.1:{port}"', f'"tcp:0.0.0.0:{port}"\nplain_networks = ["10.0.0.0/8"]'
        text = folder.file.read_text()
        folder.file.write_text(text.replace(f'"unix:{folder.path}/nbd-0"', old))
        current = folder.config()
        folder.file.write_text(folder.file.read_text().replace(old, new))
        assert prepare(ConfigFile(folder.file), current).difference.planes.changed == ("nbd-0",)
        current = folder.config()
        folder.file.write_text(folder.file.read_text().replace("0.0.0.0:", "192.0.2.1:"))
        refused(folder, current, "tcp:192.0.2.1:0: cannot listen")  # no address of this host
