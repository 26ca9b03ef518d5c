"""Configuration files: TOML read into pydantic models; unknown keys are errors; the environment overrides.

``SLA__SECTION__KEY=value`` overrides ``[section] key`` of the server's file, ``SLA_AGENT__...`` of the
agent's (the value is read as TOML, else as a string). Every command has ``--show-config`` (the values in
force, as TOML) and ``--check-config``.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.toml_file import SHOWN, TOO_DEEP, TOO_LONG, read_toml

Model = TypeVar("Model", bound=BaseModel)
ENV_PREFIX = "SLA__"
AGENT_ENV_PREFIX = "SLA_AGENT__"
_MOST_BITS: Final = 1000  # floats hold 1,024; Python shows numbers up to 4,300 digits
_BARE_KEY: Final = re.compile("[A-Za-z0-9_-]+")
_SECRETS: Final = ("password", "secret", "token")
# The secret ends at the last @ before the next URL of the line; it may hold blanks. Bounded: a line of many
# addresses would take a time that grows with its square.
_USERINFO: Final = re.compile(r"(://[^:/@\s]{0,256}):(?:\S|[^\S\n](?!\S{0,64}://)){0,512}@")
_PARAMETER: Final = re.compile(
    r"(?i)([?&;][^=&;?#\s]*(?:pass|pwd|secret|token|key|cred|sig)[^=&;?#\s]*=)[^&;#\s\"']*"
)


def masked(text: str) -> str:
    """The text with the secrets of every URL in it replaced by ``***``.

    Those are ``secret`` in ``scheme://user:secret@host`` and the values of parameters whose names say so
    (password, token, secret_key, ...). Texts with URLs end up in logs, tickets and public answers.
    """
    return _PARAMETER.sub(r"\1***", _USERINFO.sub(r"\1:***@", text)) if "://" in text else text


class StrictModel(BaseModel):
    """Base of all configuration models: unknown keys are refused, values are validated on assignment."""

    # Without use_attribute_docstrings: to read its own source costs a process more than all else of a model.
    # docs.reference finds what is below the fields.
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


def _from_environment(environment: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The tables that the variables make. A table's own variable is read before those of its keys."""
    tree: dict[str, Any] = {}
    names = (variable for variable in environment if variable.startswith(prefix))
    for variable in sorted(names, key=lambda name: (name.count("__"), name)):
        text = environment[variable]
        *sections, key = variable[len(prefix) :].lower().split("__")
        node = tree
        for depth, section in enumerate(sections, 1):
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                table = prefix + "__".join(sections[:depth]).upper()
                raise ConfigError(
                    variable,
                    f"sets a key of [{'.'.join(sections[:depth])}], which {table} sets to a single value",
                    f"Remove one of the two, or give {table} a table: {{key = value}}",
                )
        try:
            node[key] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            node[key] = text
        except RecursionError as exc:
            raise ConfigError(variable, *TOO_DEEP) from exc
        except ValueError as exc:
            raise ConfigError(variable, f"{text[:SHOWN]}... {TOO_LONG}") from exc
    return tree


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _check_values(value: Any, key: str) -> None:
    """Refuse what no setting can be, and what later would fail far from the file: as a path, or when shown.

    Raises:
        ValueError: names the key and the value.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _check_values(name, key or "(whole file)")
            _check_values(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_values(item, f"{key}.{number}")
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"{key}: {hex(value)[:SHOWN]}... is a number of more than {_MOST_BITS} bits")
    elif isinstance(value, str):
        shown = "***" if key.endswith(_SECRETS) else masked(repr(value))
        if "\0" in value:
            raise ValueError(f"{key}: {shown} has a NUL character; remove it")
        if not value.isascii() and value.encode(errors="replace").decode() != value:
            raise ValueError(f"{key}: {shown} is not UTF-8; write it so")


def load(
    model: type[Model],
    path: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
    prefix: str = ENV_PREFIX,
    overrides: dict[str, Any] | None = None,
) -> Model:
    """Read ``path`` (or nothing), apply the environment and then ``overrides``, and validate.

    Raises:
        ConfigError: names the file, the key, the value and what is expected.
    """
    variables = os.environ if environment is None else environment
    tree = _merge(read_toml(path), _from_environment(variables, prefix))
    tree = _merge(tree, overrides or {})
    try:
        _check_values(tree, "")
    except ValueError as exc:
        raise ConfigError(str(path or "configuration"), str(exc)) from exc
    try:
        return model.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError(str(path or "configuration"), describe(exc, model)) from exc


def describe(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All problems of a validation error in one readable text: key, problem, value.

    With ``model`` a key that does not exist is said with those that are spelt like it.
    """
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _keys_beside(model, item["loc"]), 3)
            fix = f"did you mean {' or '.join(near)}?" if near else "remove it or correct its spelling"
            parts.append(f"{key}: no such key; {fix}")
        elif item["type"] == "missing":
            parts.append(f"{key}: is required")
        else:
            message = plain_problem(item).removeprefix("(whole file): ")
            # A whole table as "value" would bury the message; the message names what is wrong in it.
            is_table = isinstance(item["input"], dict | list | BaseModel)
            shown = "" if is_table else masked(f" (value: {item['input']!r})")
            parts.append(f"{key}: {message}{shown}")
    return "; ".join(parts)


def _keys_beside(model: type[BaseModel] | None, place: Sequence[int | str]) -> list[str]:
    """Keys of the table that ``place`` lies in; none if it is no table of fixed keys."""
    for part in place[:-1]:
        if isinstance(part, int) or model is None:
            continue
        field = model.model_fields.get(part)
        model = next(_models_in(field.annotation), None) if field is not None else None
    return list(model.model_fields) if model is not None else []


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models in a type such as ``list[PlaneEntry]`` or ``Part | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)


_LIMITS: Final = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_KINDS: Final = {"float": "a number", "int": "a whole number", "bool": "true or false", "string": "text"}


def plain_problem(item: Any) -> str:
    """What is wrong with a value, for people who know numbers and text but not the models.

    Args:
        item: one of ``ValidationError.errors()``.
    """
    kind, context, value = str(item["type"]), item.get("ctx", {}), item["input"]
    if value != value or str(value).strip().lower() == "nan":
        return "is not a number"
    for key, word in _LIMITS.items():
        if key in context:
            return f"should be {word} {_limit_text(context[key])}"
    if kind == "string_too_short":
        return "is empty" if context["min_length"] == 1 else f"is shorter than {context['min_length']}"
    if kind == "string_too_long":
        return f"has {len(value)} characters, at most {context['max_length']} are possible"
    if kind == "string_pattern_mismatch":
        return f"does not have the form {context['pattern']}"
    what = _KINDS.get(kind.partition("_")[0])
    if what is not None and kind.partition("_")[2] in ("type", "parsing", "from_float", "parsing_size"):
        return f"should be {what}"
    return str(item["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def _limit_text(limit: Any) -> str:
    if not isinstance(limit, int | float):
        return str(limit)
    return f"{limit:,.0f}" if limit == int(limit) else f"{limit:g}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    text = masked(str(value)).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key)


def show(model: BaseModel) -> str:
    """The values in force as TOML, secrets masked (keys that end in password, secret or token, and URLs)."""
    lines: list[str] = []

    def table(prefix: str, values: dict[str, Any]) -> None:
        plain = {key: item for key, item in values.items() if not isinstance(item, dict) and item is not None}
        if prefix and plain:
            lines.extend(("", f"[{prefix}]"))
        for key, item in plain.items():
            shown = "***" if key.endswith(_SECRETS) and item else item
            lines.append(f"{_toml_key(key)} = {_toml_value(shown)}")
        for key, item in values.items():
            if isinstance(item, dict):
                table(f"{prefix}.{key}" if prefix else key, item)

    table("", model.model_dump(mode="json"))
    return "\n".join(lines).strip() + "\n"


def is_port(text: str) -> bool:
    """Whether this is a port's number, 0 to 65535."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


def split_address(value: str) -> tuple[str, int] | None:
    """Host without brackets, and port, of ``HOST:PORT``; None: another form. The caller checks the host."""
    host, _, port = value.rpartition(":")
    host = host.strip("[]")
    return (host, int(port)) if host and is_port(port) else None


def parse_address(value: str) -> tuple[str, int]:
    """("127.0.0.1", 7411) from "127.0.0.1:7411".

    Raises:
        ValueError: not "address:port".
    """
    found = split_address(value)
    if found is None:
        raise ValueError('expected "address:port", the port at most 65535, for example "127.0.0.1:7411"')
    host, port = found
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError as exc:
        raise ValueError(f'{host!r} is not an IP address; use "127.0.0.1:{port}"') from exc
    return host, port


def _address(value: str) -> str:
    parse_address(value)
    return value


ListenAddress = Annotated[str, AfterValidator(_address)]
"""A setting: IP address and port of this machine; port 0 is any free one."""
