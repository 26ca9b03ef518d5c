"""Messages between the application server and services, in the small mailbox segment.

Participants: ``appserver``, ``services``, ``dbmanager``, ``supervisor``. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import FoldedMessage, Header, Key, WireMessage

MAX_WHO: Final = 200  # characters
OTHER_KEYS: Final = (
    "name",
    "objective",
    "state",
    "compliance",
    "coverage",
    "budget_remaining",
    "budget_minutes_left",
    "target",
    "burn_1h",
    "alerts",
    "good_s",
    "bad_s",
)
"""Values of a row of ``others`` in the live view; older services send the first six at least."""


@dataclass(frozen=True, slots=True)
class ServiceRequest(WireMessage):
    """A change that services is asked for; see "Requests to services"."""

    KIND: ClassVar = Kind.REQUEST
    request: Annotated[str, Key("req")]
    op: str
    who: str
    body: Annotated[Header | None, Key(form="{}")]

    @classmethod
    def parse(cls, header: Header) -> ServiceRequest:
        """Check a header. What has an id is read, so that services can answer what is wrong with the rest.

        Raises:
            MalformedFrame: there is no id to answer to.
        """
        request, op, who, body = (header.get(key) for key in ("req", "op", "who", "body"))
        if not isinstance(request, str) or not request:
            raise MalformedFrame(f"REQUEST: key 'req' is {excerpt(request)}, expected an id to answer to")
        return cls(
            request,
            op if isinstance(op, str) else excerpt(op),
            str(who or "unknown")[:MAX_WHO],
            body if isinstance(body, dict) else None,
        )


@dataclass(frozen=True, slots=True)
class ServiceResponse(FoldedMessage):
    """The answer to a REQUEST; ``code`` as in HTTP.

    After 5 s code 202, and the final one later under the same ``req``.
    """

    KIND: ClassVar = Kind.RESPONSE
    request: Annotated[str, Key("req")]
    ok: bool
    code: int
    body: Annotated[Header, Key(form="{}")]

    @classmethod
    def of(cls, request: str, code: int, body: Header) -> ServiceResponse:
        """The answer with this code."""
        return cls(request, code < 400, code, body)

    @classmethod
    def parse(cls, header: Header) -> ServiceResponse:
        """Read leniently: an answer without a sound code is a success or a fault, as ``ok`` says."""
        ok, code, body = bool(header.get("ok")), header.get("code"), header.get("body")
        code = code if isinstance(code, int) and 200 <= code <= 599 else (200 if ok else 500)
        return cls(
            request=str(header.get("req")),
            ok=ok,
            code=500 if not ok and code < 400 and code != 202 else code,
            body=body if isinstance(body, dict) else {},
        )


@dataclass(frozen=True, slots=True)
class Snapshot(WireMessage):
    """The live view, see "Live snapshot": once a second, with tens of thousands of agreements every three.

    Above a header's 64 KiB the header is ``at_us, json: true, bytes: n`` and the view is n bytes of JSON in
    the blob.
    """

    KIND: ClassVar = Kind.SNAPSHOT
    at_us: int
    view: Annotated[Header, Key("...", "see Live snapshot")]

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {**self.view, "at_us": self.at_us}

    def encode_as_json(self, text: bytes) -> bytes:
        """The frame of a view that exceeds a header; ``text`` is the view as JSON."""
        return frame.encode(self.KIND, {"at_us": self.at_us, "json": True, "bytes": len(text)}, text)

    @classmethod
    def parse(cls, message: frame.Frame) -> Snapshot:
        """The view, from the header or from the blob.

        Raises:
            ValueError: the blob holds no map in JSON.
            KeyError: the header lacks ``bytes``.
        """
        view = message.header
        if view.get("json"):
            view = strict_json.loads(bytes(message.blob[: int(view["bytes"])]).decode())
            if not isinstance(view, dict):
                raise ValueError("snapshot is not a map")
        return cls(view.get("at_us", 0), view)
