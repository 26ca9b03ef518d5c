"""What services orders: the caps, thresholds and costs of one gateway, and that it is alive.

From services to the pair that polls the gateway, in the main mailbox segment. The pair passes a set on as it
came. Pure.

Source: DESIGN.md 3 and 4; docs/formats/messages.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import END_OF_GENERATIONS, CapSet
from pmdaemon.wire.messages.base import FoldedMessage, Header, Key, WireMessage
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.thresholds import Thresholds

_SETS: Final = ("lease_us", "caps", "clients", "groups", "whole_clients")


@dataclass(frozen=True, slots=True)
class CapsOrder(FoldedMessage):
    """The complete caps of one gateway: ``gw``, and the keys of CAPS.

    The pair passes on all keys but ``gw``, also those that it does not know. Folded above 64 KiB.
    """

    KIND: ClassVar = Kind.SET_CAPS
    gateway_id: Annotated[str, Key("gw")]
    gen: int
    lease_us: Annotated[int | None, Key(form="int", is_optional=True)] = None
    caps: Annotated[Sequence[Header] | None, Key(form="as in CAPS", is_optional=True)] = None
    clients: Annotated[Sequence[Header] | None, Key(form="as in CAPS", is_optional=True)] = None
    groups: Annotated[Sequence[Header] | None, Key(form="as in CAPS", is_optional=True)] = None
    whole_clients: Annotated[Sequence[Header] | None, Key(form="as in CAPS", is_optional=True)] = None
    others: Annotated[Header, Key("(others)", "as they came")] = field(default_factory=dict)

    @classmethod
    def of(cls, gateway_id: str, caps: CapSet) -> CapsOrder:
        """The order that puts a set in force."""
        sets = {key: getattr(caps, key) for key in _SETS}
        return cls(gateway_id, caps.gen, **sets)

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {"gw": self.gateway_id, **self._of_caps()}

    def _of_caps(self) -> Header:
        """The header of the CAPS frame."""
        said = {key: value for key in _SETS if (value := getattr(self, key)) is not None}
        return {"gen": self.gen, **said, **self.others}

    @classmethod
    def parse(cls, header: Header) -> CapsOrder:
        """Check whom it is for, and that an agent will take its generation.

        Raises:
            MalformedFrame: ``gw`` or ``gen`` is missing, of the wrong type, or no agent would take it.
        """
        gateway_id, gen = header.get("gw"), header.get("gen")
        if not isinstance(gateway_id, str) or type(gen) is not int or not 0 <= gen < END_OF_GENERATIONS:
            raise MalformedFrame(f"SET_CAPS for gateway {excerpt(gateway_id)}, generation {excerpt(gen)}")
        sets = {key: header.get(key) for key in _SETS}
        known = ("gw", "gen", *(key for key, value in sets.items() if value is not None))
        others = {key: value for key, value in header.items() if key not in known}
        return cls(gateway_id, gen, **sets, others=others)

    @classmethod
    def of_frame(cls, gateway_id: str, encoded: bytes) -> CapsOrder:
        """The order that a CAPS frame was made of."""
        return cls.parse({"gw": gateway_id, **frame.unfold(frame.decode(encoded)).header})

    def caps_frame(self) -> bytes:
        """The CAPS frame for the gateway.

        Raises:
            FrameTooLarge: more caps than a folded header holds.
        """
        return frame.encode_folding(Kind.CAPS, self._of_caps())


@dataclass(frozen=True, slots=True)
class ThresholdsOrder(WireMessage):
    """The threshold set of one gateway: ``gw``, and the keys of THRESHOLDS.

    Sent in answer to each GATEWAY up, and when the set changes. Passed on, not kept.
    """

    KIND: ClassVar = Kind.SET_THRESHOLDS
    gateway_id: Annotated[str, Key("gw")]
    body: Annotated[Header, Key("version, entries", "as in THRESHOLDS")]

    @classmethod
    def of(cls, gateway_id: str, thresholds: Thresholds) -> ThresholdsOrder:
        """The order that puts a set in force."""
        return cls(gateway_id, thresholds.header())

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {"gw": self.gateway_id, **self.body}

    @classmethod
    def parse(cls, header: Header) -> ThresholdsOrder:
        """Check whom it is for.

        Raises:
            MalformedFrame: ``gw`` or ``version`` is missing or of the wrong type.
        """
        gateway_id, version = header.get("gw"), header.get("version")
        if not isinstance(gateway_id, str) or type(version) is not int:
            raise MalformedFrame(
                f"SET_THRESHOLDS for gateway {excerpt(gateway_id)}, version {excerpt(version)}"
            )
        return cls(gateway_id, {key: value for key, value in header.items() if key != "gw"})

    def thresholds_frame(self) -> bytes:
        """The THRESHOLDS frame for the gateway.

        Raises:
            FrameTooLarge: more entries than a frame holds.
        """
        return frame.encode(Kind.THRESHOLDS, self.body)


@dataclass(frozen=True, slots=True)
class CostsOrder(WireMessage):
    """What an I/O costs the backends of one gateway: ``gw``, and the keys of COSTS. Passed on, not kept."""

    KIND: ClassVar = Kind.SET_COSTS
    gateway_id: Annotated[str, Key("gw")]
    body: Annotated[Header, Key("version, backends", "as in COSTS")]

    @classmethod
    def of(cls, gateway_id: str, costs: Costs) -> CostsOrder:
        """The order that puts costs in force."""
        return cls(gateway_id, costs.header())

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {"gw": self.gateway_id, **self.body}

    @classmethod
    def parse(cls, header: Header) -> CostsOrder:
        """Check whom it is for.

        Raises:
            MalformedFrame: ``gw`` or ``version`` is missing or of the wrong type.
        """
        gateway_id, version = header.get("gw"), header.get("version")
        if not isinstance(gateway_id, str) or type(version) is not int:
            raise MalformedFrame(f"SET_COSTS for gateway {excerpt(gateway_id)}, version {excerpt(version)}")
        return cls(gateway_id, {key: value for key, value in header.items() if key != "gw"})

    def costs_frame(self) -> bytes:
        """The COSTS frame for the gateway."""
        return frame.encode(Kind.COSTS, self.body)


@dataclass(frozen=True, slots=True)
class Lease(WireMessage):
    """Services is alive: once a second.

    ``inc`` is drawn at the start of services, so that the pair sees a restart and announces its gateways
    again.
    """

    KIND: ClassVar = Kind.LEASE
    incarnation: Annotated[int | None, Key("inc", "int")]

    @classmethod
    def parse(cls, header: Header) -> Lease:
        """The incarnation is only compared with the one before."""
        return cls(header.get("inc"))
