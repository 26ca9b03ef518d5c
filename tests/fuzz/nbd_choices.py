"""The operations of one connection: random, by its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gateway_agent.nbd import protocol as p
from tests.fuzz.nbd_model import CHANGES, GATEWAY, PEER, Region, Request, Rules

MAX_TRIES = 200


@dataclass
class Plan:
    """How one connection behaves.

    Attributes:
        seed: of everything random.
        operations: how many it does.
        depth: requests under way at most.
        most_bytes: of one request.
        cuts: disconnects in the middle of a request, at most.
        mode: how it wants its replies.
    """

    seed: int
    operations: int
    depth: int
    most_bytes: int
    rules: Rules
    is_read_only: bool = False
    cuts: int = 3
    mode: p.ReplyMode = p.SIMPLE_REPLIES
    counts: dict[str, int] = field(default_factory=dict)


class Chooser:
    """The operations of one connection, by the seed alone."""

    def __init__(self, plan: Plan, region: Region, facts: p.ExportFacts) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._region = region
        self._facts = facts
        self._unit = facts.blocks.minimum
        self._cookie = self._rng.getrandbits(63)
        self._noise = self._rng.randbytes(plan.most_bytes + 4096)
        self._kinds = ["read"] * 40 + ["refusal"] * 14 + ["twin"] * 2 + ["pause"] * 3 + ["flush"] * 2
        if plan.mode.allocation:
            self._kinds += ["status"] * 8
        if facts.flags & p.TX_SEND_CACHE:
            self._kinds += ["cache"] * 4
        if not plan.is_read_only:
            self._kinds += ["write"] * 28 + ["zero"] * 7 + ["trim"] * 4 + ["cut"] * 2

    def kind(self) -> str:
        """What to do next."""
        return self._rng.choice(self._kinds)

    @property
    def may_repeat_cookies(self) -> bool:
        """Whether replies can be told apart: a peer does two of one cookie at once, and chunks mix."""
        return not (self._plan.mode.structured and self._plan.rules is PEER)

    def chance(self, ratio: float) -> bool:
        """True in that share of the cases."""
        return self._rng.random() < ratio

    def below(self, limit: int) -> int:
        """A number of [0, limit)."""
        return self._rng.randrange(limit)

    def request(self, kind: str) -> Request:
        """A request that must be served; a change that finds no place becomes a read."""
        self._cookie = (self._cookie + 1) & 0xFFFFFFFFFFFFFFFF
        fua = p.CMD_FLAG_FUA if self.chance(0.2) and self._facts.flags & p.TX_SEND_FUA else 0
        if kind == "flush":
            return Request(self._cookie, p.Cmd.FLUSH, 0, 0, fua)
        for _ in range(MAX_TRIES):
            offset, length = self._range()
            if kind == "write":
                found = Request(self._cookie, p.Cmd.WRITE, offset, length, fua, self._payload(length))
            elif kind == "zero":
                found = self._zeroes(offset, length, fua)
            elif kind == "trim":
                found = Request(self._cookie, p.Cmd.TRIM, offset, length, fua)
            else:
                break
            if self._region.may_change(found):
                return found
        return self._look(kind)

    def _zeroes(self, offset: int, length: int, fua: int) -> Request:
        flags, errors = fua | (p.CMD_FLAG_NO_HOLE if self.chance(0.5) else 0), {0}
        if self._facts.flags & p.TX_SEND_FAST_ZERO and self.chance(0.3):
            flags, errors = flags | p.CMD_FLAG_FAST_ZERO, {0, p.ENOTSUP}
        return Request(self._cookie, p.Cmd.WRITE_ZEROES, offset, length, flags, errors=frozenset(errors))

    def _look(self, kind: str) -> Request:
        """A request that changes nothing."""
        offset, length = self._range()
        if kind == "cache":
            return Request(self._cookie, p.Cmd.CACHE, offset, length)
        if kind == "status":
            flags = p.CMD_FLAG_REQ_ONE if self.chance(0.3) else 0
            return Request(self._cookie, p.Cmd.BLOCK_STATUS, offset, length, flags)
        flags = p.CMD_FLAG_DF if self._facts.flags & p.TX_SEND_DF and self.chance(0.2) else 0
        return Request(self._cookie, p.Cmd.READ, offset, length, flags)

    def _payload(self, length: int) -> bytes:
        at = self.below(len(self._noise) - length + 1)
        return self._noise[at : at + length]

    def _range(self) -> tuple[int, int]:
        """Offset and length, aligned as the server wants it; small ones most of all, at odd places too."""
        blocks = self._facts.blocks
        room = (self._region.end - self._region.begin) // self._unit
        most = min(self._plan.most_bytes, blocks.maximum) // self._unit
        limit = self._rng.choice((8, 4096, 4096, 65536, 65536, 300_000, most * self._unit)) // self._unit
        length = 1 + self.below(max(1, min(limit, most, room)))
        offset = self.below(room - length + 1)
        if self._unit == 1 and self.chance(0.7):
            offset, length = offset & ~511, max(512, length & ~511)
        return self._region.begin + offset * self._unit, length * self._unit

    def refusal(self) -> Request:
        """A request that must not be served."""
        self._cookie = (self._cookie + 1) & 0xFFFFFFFFFFFFFFFF
        kind = self._rng.choice(sorted(self._plan.rules.refusals))
        errors = self._plan.rules.refusals[kind]
        size, unit = self._facts.size_bytes, max(512, self._unit)
        length = unit * (1 + self.below(8))
        if kind == "read beyond the end":
            offset = self._rng.choice((size - length + unit, size, size + (1 << 40), (1 << 64) - unit))
            return Request(self._cookie, p.Cmd.READ, offset, length, errors=errors)
        if kind in ("change beyond the end", "change"):
            offset = self._region.begin if kind == "change" else size - length + unit
            command = self._rng.choice(CHANGES)
            payload = self._payload(length) if command == p.Cmd.WRITE else b""
            if command == p.Cmd.TRIM and errors == {p.ENOSPC}:
                errors = frozenset({p.EINVAL})
            return Request(self._cookie, command, offset, length, 0, payload, errors)
        if kind == "command":
            status = () if self._plan.mode.allocation else (int(p.Cmd.BLOCK_STATUS),)
            command = self._rng.choice((*status, 8, 99, 65535))
            return Request(self._cookie, command, 0, length, errors=errors)
        if kind == "read too long":
            blocks = self._facts.blocks
            return Request(self._cookie, p.Cmd.READ, 0, blocks.maximum + blocks.minimum, errors=errors)
        if kind == "unaligned" and self._unit > 1:
            return Request(self._cookie, p.Cmd.READ, self._unit // 2, self._unit, errors=errors)
        return self._bad_flag(length, self._plan.rules.refusals["flag"])

    def _bad_flag(self, length: int, errors: frozenset[int]) -> Request:
        choices = [(p.Cmd.READ, p.CMD_FLAG_NO_HOLE), (p.Cmd.READ, 1 << 15)]
        if not self._facts.flags & p.TX_SEND_DF:
            choices.append((p.Cmd.READ, p.CMD_FLAG_DF))
        if not self._plan.is_read_only:
            choices += [(p.Cmd.WRITE, p.CMD_FLAG_NO_HOLE), (p.Cmd.TRIM, p.CMD_FLAG_NO_HOLE)]
            if not self._facts.flags & p.TX_SEND_FAST_ZERO and self._plan.rules is GATEWAY:
                choices.append((p.Cmd.WRITE_ZEROES, p.CMD_FLAG_FAST_ZERO))  # nbdkit 1.32 ends at that
        command, flag = self._rng.choice(choices)
        payload = self._payload(length) if command == p.Cmd.WRITE else b""
        return Request(self._cookie, command, self._region.begin, length, flag, payload, errors)
