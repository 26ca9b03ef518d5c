"""``python -m sla_server.cli``: the same command as ``sla``."""

from pmdaemon.runtime import entry


def main() -> None:
    """Run the command."""
    entry.run("sla_server.cli.main", "sla")


if __name__ == "__main__":
    main()
