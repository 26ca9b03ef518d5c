"""What all messages share: fields with their keys on the wire, and the checks that ``parse`` is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, NamedTuple, get_args, get_origin, get_type_hints

from pmdaemon.errors import FrameTooLarge, MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame, names
from pmdaemon.wire.kinds import Kind

Header = dict[str, Any]
MAX_TEXT: Final = 256


class Key(NamedTuple):
    """How a field of a message is written, where its own name and type do not say it.

    Attributes:
        name: the key in the header; empty for the field's own name.
        form: its type as documents show it.
        is_optional: whether the key is left out while the field is None.
    """

    name: str = ""
    form: str = ""
    is_optional: bool = False


class WireField(NamedTuple):
    """One field of a message class: the attribute, and its key on the wire."""

    attribute: str
    key: Key


class WireMessage:
    """Base of all messages: a frozen dataclass, whose fields in their order are the header."""

    __slots__ = ()
    KIND: ClassVar[Kind]

    def header(self) -> Header:
        """The header as it goes on the wire."""
        pairs = [
            (item.key.name, getattr(self, item.attribute), item.key.is_optional)
            for item in fields_of(type(self))  # type: ignore[arg-type]  # a class has a hash
        ]
        return {name: value for name, value, is_optional in pairs if not (is_optional and value is None)}

    def encode(self) -> bytes:
        """The frame.

        Raises:
            FrameTooLarge: the header does not fit a frame.
        """
        return frame.encode(self.KIND, self.header())


class FoldedMessage(WireMessage):
    """One whose header may be longer than a frame's: above 64 KiB it travels in the frame's body."""

    __slots__ = ()

    def encode(self) -> bytes:
        """The frame.

        Raises:
            FrameTooLarge: it is longer than a frame may be.
        """
        return frame.encode_folding(self.KIND, self.header())


@lru_cache(maxsize=128)
def fields_of(message: type[WireMessage]) -> tuple[WireField, ...]:
    """The fields of a message class in the order of the wire."""
    hints = get_type_hints(message, include_extras=True)
    return tuple(
        WireField(item.name, _key_of(item.name, hints[item.name]))
        for item in fields(message)  # type: ignore[arg-type]  # each is a dataclass; the base cannot be one
    )


def _key_of(attribute: str, hint: Any) -> Key:
    key = Key()
    if get_origin(hint) is Annotated:
        hint, key = get_args(hint)[0], next(item for item in get_args(hint) if isinstance(item, Key))
    return Key(key.name or attribute, key.form or form_of(hint), key.is_optional)


def form_of(hint: Any) -> str:
    """A Python type as documents show it."""
    if hint is type(None):
        return "nil"
    parts = get_args(hint)
    if not parts:
        return str(hint.__name__)
    if get_origin(hint) is dict:
        return f"{{{form_of(parts[0])}: {form_of(parts[1])}}}"
    if get_origin(hint) in (tuple, list, Sequence):
        return f"[{form_of(parts[0])}]"
    return " | ".join(form_of(part) for part in parts)


def whole(header: Header, frame_name: str, key: str, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``.

    Raises:
        MalformedFrame: it is none; names frame, key and value.
    """
    value = header.get(key)
    if type(value) is not int or not low <= value <= high:
        raise MalformedFrame(
            f"{frame_name}: key {key!r} is {excerpt(value)}, expected an integer from {low} to {high}"
        )
    return value


def count(header: Header, key: str, limit: int = 1 << 63) -> int:
    """An integer of 0 or more, below ``limit``.

    Raises:
        MalformedFrame: it is none.
    """
    value = header.get(key)
    if type(value) is not int or not 0 <= value < limit:
        raise MalformedFrame(
            f"key {key!r} is {excerpt(value)}, expected an integer of 0 or more, below {limit}"
        )
    return value


def rows(header: Header, frame_name: str, key: str, limit: int) -> list[Any]:
    """A list of at most ``limit`` entries.

    Raises:
        MalformedFrame: it is none.
        FrameTooLarge: it has more entries.
    """
    value = header.get(key)
    if not isinstance(value, list):
        raise MalformedFrame(f"{frame_name}: key {key!r} is {excerpt(value)}, expected a list")
    if len(value) > limit:
        raise FrameTooLarge(f"{frame_name}: list {key!r} (entries, not bytes)", len(value), limit)
    return value


def text(header: Header, frame_name: str, key: str) -> str:
    """Printable text of ``MAX_TEXT`` characters at most.

    Raises:
        MalformedFrame: it is none.
    """
    value = header.get(key)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise MalformedFrame(
            f"{frame_name}: key {key!r} is {excerpt(value)}, expected printable text of {MAX_TEXT} at most"
        )
    return value


def name(header: Header, frame_name: str, key: str) -> str:
    """The name of a volume, client or backend.

    Raises:
        MalformedFrame: it is none (``names.NAME_RE``).
    """
    value = header.get(key)
    if not isinstance(value, str) or not names.is_name(value):
        raise MalformedFrame(
            f"{frame_name}: key {key!r} is {excerpt(value)}, "
            "expected a name (letters, digits and ._:@-, 128 at most)"
        )
    return value


def maps(frame_name: str, header: Header, key: str) -> tuple[Header, ...]:
    """A list of maps.

    Raises:
        MalformedFrame: names the message and the key.
    """
    value = header.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise MalformedFrame(f"{frame_name} key {key!r} is no list of maps")
    return tuple(value)
