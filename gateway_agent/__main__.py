"""``python -m gateway_agent``: the same command as ``gateway-agent``."""

from pmdaemon.runtime import entry


def main() -> None:
    """Run the command."""
    entry.run("gateway_agent.cli", "gateway-agent")


if __name__ == "__main__":
    main()
