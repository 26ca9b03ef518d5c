"""A folder with an agent's file, and what a reload says of it."""

import pytest

from gateway_agent.config import load_agent
from gateway_agent.reload import ConfigFile, prepare
from pmdaemon.errors import ConfigError

TOP = 'name = "gw-a"\nstate_dir = "{0}/s"\nruntime_dir = "{0}/r"\n'


class Folder:
    def __init__(self, path):
        self.path, self.file = path, path / "agent.toml"
        self.run_dir = path / "r"
        self.run_dir.mkdir()

    def write(self, planes, top="", more=""):
        """``planes``: {plane: volumes}."""
        text = TOP.format(self.path) + top
        for plane, volumes in planes.items():
            text += f'[[plane]]\nname = "{plane}"\nlisten = "unix:{self.path}/{plane}"\n'
            for volume in volumes:
                image = self.path / f"{volume}.img"
                image.write_bytes(bytes(512))
                text += f'[[export]]\nvolume = "{volume}"\nbackend = "b"\nplane = "{plane}"\n'
                text += f'file = "{image}"\n'
        self.file.write_text(text + more)

    def config(self):
        return load_agent(self.file)


def refused(folder, current, problem, error=ConfigError):
    with pytest.raises(error, match=problem):
        prepare(ConfigFile(folder.file), current)
