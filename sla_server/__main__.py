"""``python -m sla_server`` is ``sla-server``."""

from sla_server.cli.server import cli

if __name__ == "__main__":
    cli()
