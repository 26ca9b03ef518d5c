"""``sla export`` and ``sla import``: agreements as OpenSLO documents, and back.

Documents go to standard output, what does not map to standard error, so that the one can be written to a file
while the other is read.
"""

from __future__ import annotations

import io
from typing import Any, Final
from urllib.parse import quote

import click
from ruamel.yaml import YAML

from pmdaemon.runtime.excerpt import printable, printable_lines
from sla_server.agreements.document import Agreement
from sla_server.agreements.load import NOT_YAML, syntax_problem
from sla_server.agreements.openslo import Converted, from_openslo, to_openslo
from sla_server.cli.change import read_documents
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import pass_client

ODD_VALUES: Final = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What values of types that OpenSLO does not have lead to."""
MOST_VALUES: Final = 100_000
"""Of a file, with its aliases written out."""
OPENSLO = click.option("--openslo", is_flag=True, required=True, help="The other form: OpenSLO v1.")


@click.command("export")
@OPENSLO
@click.argument("name")
@pass_client
def export_agreement(client: Client, openslo: bool, name: str) -> None:
    """Print agreement NAME as OpenSLO.

    There is one document for each latency objective.
    """
    row = client.get(f"/slas/{quote(name, safe='')}")
    found = to_openslo(Agreement.from_spec(row["spec"]))
    if not found.documents:
        raise BadUsage(f"{name} has no latency objective; there is nothing to export")
    _show(found)


@click.command("import")
@OPENSLO
@click.argument("path", metavar="FILE")
def import_documents(openslo: bool, path: str) -> None:
    """Print the agreements that an OpenSLO FILE describes; change nothing.

    FILE may be - for standard input. What is left empty has no counterpart there: fill it in, then sla apply.
    """
    _show(read_openslo(path))


def read_openslo(path: str) -> Converted:
    """The agreements that a file describes.

    Raises:
        BadUsage: it cannot be read, is not YAML, is too large, or holds no SLO.
    """
    text = read_documents(path).decode()
    try:
        documents = list(YAML(typ="safe", pure=True).load_all(text))
    except NOT_YAML as exc:
        raise BadUsage(f"{path} cannot be imported: {printable(str(syntax_problem(exc)), 300)}") from exc
    if _is_large(documents):
        problem = f"it has more than {MOST_VALUES:,} values, as its aliases are written out; split the file"
        raise BadUsage(f"{path} cannot be imported: {problem}")
    try:
        return from_openslo(documents)
    except ValueError as exc:
        raise BadUsage(f"{path} cannot be imported: {printable(str(exc), 300)}") from exc
    except ODD_VALUES as exc:
        problem = "a value in it is of a type that OpenSLO v1 does not have there; compare it with an example"
        raise BadUsage(f"{path} cannot be imported: {problem}") from exc


def _is_large(documents: list[Any]) -> bool:
    """Whether there are more than ``MOST_VALUES`` values, with their aliases written out."""
    waiting, count = [iter(documents)], 0
    while waiting and count <= MOST_VALUES:
        for value in waiting[-1]:
            count += 1
            if isinstance(value, dict | list):
                waiting.append(iter(value.values() if isinstance(value, dict) else value))
            break
        else:
            waiting.pop()
    return count > MOST_VALUES


def document_text(document: dict[str, Any]) -> str:
    """One document as YAML."""
    writer = YAML()
    writer.default_flow_style = False
    writer.explicit_start = True
    text = io.StringIO()
    writer.dump(_plain(document), text)
    return text.getvalue()


def _show(found: Converted) -> None:
    for document in found.documents:
        click.echo(document_text(document), nl=False)
    for line in found.unmapped:
        click.echo(printable_lines(f"not mapped: {line}"), err=True)


def _plain(value: Any) -> Any:
    """Copies, so that the writer makes no anchors of what is in a document twice."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
