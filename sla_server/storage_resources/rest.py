"""Space of an array by its REST interface: one GET, and JSONPath for where the figures are in the answer.

The address is https, or http on this machine. A secret (``Authorization``) is a file, read for each question.
Everything, also the name's look-up and an answer that drips, ends after ``limit_s``; of the answer at most
``MOST_BYTES`` are read, and none unpacked: a few hundred bytes of gzip may be gigabytes. Redirects are not
followed, so that a secret goes to no other host. What follows ``?`` in the address is shown to nobody.

Needs the package ``python-jsonpath``, which is loaded at the first question only.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.space.readers import FoundPool, SpaceUnreadable, reading_of
from pmdaemon.wire.messages.space import Space
from sla_server.events.recipients.base import CONFIRMED
from sla_server.events.recipients.http_client import HttpClient
from sla_server.events.recipients.network import Resolver
from sla_server.events.recipients.secret_files import read_secret
from sla_server.storage_resources.config import RestSource

MOST_BYTES: Final = 4 << 20
LARGEST: Final = float(1 << 62)


def rest_reader(
    source: RestSource, limit_s: float, resolver: Resolver | None = None
) -> Callable[[int], Space]:
    """What reads one array; ``resolver`` is for tests."""
    client = HttpClient(resolver or Resolver(), source.ca_file)
    address = source.url.partition("?")[0]

    def read(now_us: int) -> Space:
        content = _ask(source, client, Deadline(limit_s))
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as exc:
            raise SpaceUnreadable(source.name, f"{address} answered no JSON: {excerpt(str(exc))}") from exc
        size, used = (_figure(source, answer, path) for path in (source.size, source.used))
        found = FoundPool(round(size), round(used))
        return reading_of(source.name, "rest", source.backend, found, {}, now_us)

    return read


def _ask(source: RestSource, client: HttpClient, deadline: Deadline) -> bytes:
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    secrets = [query] if (query := urlsplit(source.url).query) else []
    try:
        if source.authorization_file is not None:
            headers["Authorization"] = read_secret(source.authorization_file)
            secrets.append(headers["Authorization"])
        answer, content = client.exchange(
            "GET", source.url, headers, b"", deadline, secrets, MOST_BYTES + 1, quotes_body=False
        )
    except SlaError as exc:
        raise SpaceUnreadable(source.name, str(exc)) from exc
    finally:
        client.close()
    if answer is not CONFIRMED:
        raise SpaceUnreadable(source.name, f"{source.url.partition('?')[0]}: {answer.reason}")
    if len(content) > MOST_BYTES:
        raise SpaceUnreadable(source.name, f"the answer has more than {MOST_BYTES >> 20} MiB")
    if deadline.passed:
        raise SpaceUnreadable(source.name, "the answer did not end in time")
    return content


def _figure(source: RestSource, answer: Any, path: str) -> float:
    """The one number under a path, in bytes."""
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value * source.unit_bytes <= LARGEST:
        problem = f"{path} is {excerpt(value)}, expected a number of 0 or more, below {LARGEST:.0e} bytes"
        raise SpaceUnreadable(source.name, problem)
    return float(value * source.unit_bytes)
