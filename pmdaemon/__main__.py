"""``python -m pmdaemon``."""

from pmdaemon.cli import cli

if __name__ == "__main__":
    cli(prog_name="pmdaemon")
