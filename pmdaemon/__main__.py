"""``python -m pmdaemon``: the same command as ``pmdaemon``."""

from pmdaemon.runtime import entry


def main() -> None:
    """Run the command."""
    entry.run("pmdaemon.cli", "pmdaemon")


if __name__ == "__main__":
    main()
