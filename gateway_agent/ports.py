"""What the agent is to listen on, looked at before its children start.

An address that another program has ends the start at once, with the setting and that program: children that
die and start again would say so for ever, and no client would be served. Planes of an agent that was killed
let go of theirs within seconds, and the next ones try again until then. Another mistake in an address is the
planes' to report: a network that comes late must not end the agent.
"""

from __future__ import annotations

from gateway_agent.config import AgentConfig
from gateway_agent.nbd.sockets import Address, parse_listen, taken_by
from gateway_agent.reload import RUNNING
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.sockets import UNKNOWN


def check_addresses(config: AgentConfig) -> None:
    """See the module.

    Raises:
        ConfigError: another program has an address.
    """
    wanted = [
        (f"[[plane]] {plane.name} listen", parse_listen(text))
        for plane in config.plane
        for text in plane.listen
    ]
    if config.listen:
        host, port = parse_address(config.listen)
        wanted.append(("listen", Address(host=host, port=port)))
    ours = str(config.runtime_dir / RUNNING)
    for setting, address in wanted:
        holder = taken_by(address)
        # Of a socket that was handed over, the process that opened it may be gone: it was a plane of ours.
        if holder is not None and holder.command != UNKNOWN and ours not in holder.command:
            problem = f"cannot listen: the address is in use by {holder}"
            raise ConfigError(f"{setting} {address}", problem, "Stop that process, or choose another address")
