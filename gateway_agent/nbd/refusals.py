"""Which requests no storage may see: every request is checked before any work is done for it. Pure.

Source: the NBD protocol document, "Request types", "Command flags", "Size constraints", "Error values".
"""

from __future__ import annotations

from typing import Final

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.buffers import Request
from gateway_agent.nbd.protocol import Cmd

_OFFERED_BY: Final[dict[int, int]] = {
    Cmd.READ: 0,
    Cmd.WRITE: 0,
    Cmd.FLUSH: p.TX_SEND_FLUSH,
    Cmd.TRIM: p.TX_SEND_TRIM,
    Cmd.CACHE: p.TX_SEND_CACHE,
    Cmd.WRITE_ZEROES: p.TX_SEND_WRITE_ZEROES,
    Cmd.BLOCK_STATUS: 0,
}
"""The transmission flag without which a client must not send a command."""
_CHANGING: Final = frozenset((Cmd.WRITE, Cmd.TRIM, Cmd.WRITE_ZEROES))
_GROWING: Final = frozenset((Cmd.WRITE, Cmd.WRITE_ZEROES))
"""What would need more room behind the end; the others only look, or give back."""

Refusal = tuple[int, str]
"""Error number for the wire, and a text for people."""


def refusal(request: Request, facts: p.ExportFacts, mode: p.ReplyMode = p.SIMPLE_REPLIES) -> Refusal | None:
    """Why no storage may see a request; None: it may.

    Args:
        request: as it was received.
        facts: as the client was shown them.
        mode: what it negotiated.
    """
    command, flags = request[2], request[5]
    offered = _OFFERED_BY.get(command)
    if command in _CHANGING and facts.flags & p.TX_READ_ONLY:
        return p.EPERM, "this export is read-only"
    if offered is None or offered & ~facts.flags:
        return p.EINVAL, f"command {command} is not offered by this export"
    if command == Cmd.BLOCK_STATUS and not mode.allocation:
        return p.EINVAL, f"block status needs the context {p.ALLOCATION}, selected for this export"
    if flags and (unknown := flags & ~_command_flags(command, facts.flags)):
        return p.EINVAL, f"flags {unknown:#x} are not offered for command {command}"
    return _bad_range(request, facts)


def _bad_range(request: Request, facts: p.ExportFacts) -> Refusal | None:
    _, _, command, length, offset, flags, _ = request
    if command == Cmd.FLUSH:
        is_plain = not (offset or length)
        return None if is_plain else (p.EINVAL, f"a flush has offset {offset}, length {length}; both are 0")
    minimum, maximum = facts.blocks.minimum, facts.blocks.maximum
    if (offset | length) & (minimum - 1):
        return p.EINVAL, f"{length} bytes at {offset} are not multiples of the minimum block of {minimum}"
    if command <= Cmd.WRITE and length > maximum:
        error = p.EOVERFLOW if flags & p.CMD_FLAG_DF else p.EINVAL
        return error, f"{length} bytes are above the maximum of {maximum}; divide the request"
    if command == Cmd.BLOCK_STATUS and not length:
        return p.EINVAL, "block status of 0 bytes; ask for one byte at least"
    if offset + length > facts.size_bytes:
        error = p.ENOSPC if command in _GROWING else p.EINVAL
        return error, f"{length} bytes at {offset} go beyond the end at {facts.size_bytes}"
    return None


def _command_flags(command: int, offered: int) -> int:
    """Command flags that a client may set, by the transmission flags it was offered."""
    allowed = p.CMD_FLAG_FUA if offered & p.TX_SEND_FUA else 0
    if command == Cmd.WRITE_ZEROES:
        allowed |= p.CMD_FLAG_NO_HOLE | (p.CMD_FLAG_FAST_ZERO if offered & p.TX_SEND_FAST_ZERO else 0)
    elif command == Cmd.READ and offered & p.TX_SEND_DF:
        allowed |= p.CMD_FLAG_DF
    elif command == Cmd.BLOCK_STATUS:
        allowed |= p.CMD_FLAG_REQ_ONE
    return allowed
