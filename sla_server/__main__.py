"""``python -m sla_server``: the same command as ``sla-server``."""

from pmdaemon.runtime import entry


def main() -> None:
    """Run the command."""
    entry.run("sla_server.cli.server", "sla-server")


if __name__ == "__main__":
    main()
