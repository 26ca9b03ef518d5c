"""Space of an array by its REST interface: one GET, and JSONPath for where the figures are in the answer.

The address is https, or http on this machine. A secret (``Authorization``) is a file, read for each question.
The answer is read for at most ``limit_s`` and ``MOST_BYTES``; redirects are not followed, so that a secret
goes to no other host.

Needs the package ``python-jsonpath``, which is loaded at the first question only.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any, Final

import httpx

from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.space.readers import FoundPool, SpaceUnreadable, reading_of
from pmdaemon.wire.messages.space import Space
from sla_server.events.recipients.secret_files import read_secret
from sla_server.storage_resources.config import RestSource

MOST_BYTES: Final = 4 << 20
LARGEST: Final = float(1 << 62)


def rest_reader(
    source: RestSource, limit_s: float, transport: httpx.BaseTransport | None = None
) -> Callable[[int], Space]:
    """What reads one array; ``transport`` is for tests."""

    def read(now_us: int) -> Space:
        try:
            content = _ask(source, Deadline(limit_s), transport)
        except SpaceUnreadable:
            raise
        except (httpx.HTTPError, httpx.InvalidURL, OSError, SlaError) as exc:
            raise SpaceUnreadable(source.name, f"{source.url}: {exc or type(exc).__name__}") from exc
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as exc:
            raise SpaceUnreadable(source.name, f"{source.url} answered no JSON: {excerpt(str(exc))}") from exc
        size, used = (
            _figure(source, answer, path) * source.unit_bytes for path in (source.size, source.used)
        )
        found = FoundPool(round(size), round(used))
        return reading_of(source.name, "rest", source.backend, found, {}, now_us)

    return read


def _ask(source: RestSource, deadline: Deadline, transport: httpx.BaseTransport | None) -> bytes:
    headers = {"Accept": "application/json"}
    if source.authorization_file is not None:
        headers["Authorization"] = read_secret(source.authorization_file)
    verify: Any = str(source.ca_file) if source.ca_file is not None else True
    with (
        httpx.Client(
            verify=verify, timeout=deadline.left_s(), transport=transport, trust_env=False
        ) as client,
        client.stream("GET", source.url, headers=headers) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise SpaceUnreadable(source.name, f"status {answer.status_code}")
        content = b""
        for part in answer.iter_bytes():
            content += part
            if len(content) > MOST_BYTES:
                raise SpaceUnreadable(source.name, f"the answer has more than {MOST_BYTES >> 20} MiB")
            if deadline.passed:
                raise SpaceUnreadable(source.name, "the answer did not end in time")
    return content


def _figure(source: RestSource, answer: Any, path: str) -> float:
    """The one number under a path."""
    try:
        jsonpath = importlib.import_module("jsonpath")
    except ImportError as exc:
        problem = "the package python-jsonpath is not installed; pip install python-jsonpath"
        raise SpaceUnreadable(source.name, problem) from exc
    try:
        found = jsonpath.findall(path, answer)
    except jsonpath.JSONPathError as exc:
        words = " ".join(str(exc).split())
        raise SpaceUnreadable(source.name, f"{path} is no JSONPath: {excerpt(words)}") from exc
    if len(found) != 1:
        raise SpaceUnreadable(
            source.name, f"{path} finds {len(found)} values in the answer, expected one number"
        )
    value = found[0]
    if isinstance(value, str) and value.isdecimal() and len(value) <= 19:  # 64-bit numbers as text
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise SpaceUnreadable(source.name, f"{path} is {excerpt(value)}, expected a number of 0 or more")
    return float(value)
