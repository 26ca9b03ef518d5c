"""``sla maintenance``: begin work now, and end it early; what is planned is applied as documents.

``start`` writes a Maintenance document and applies it, so what was begun by hand is stored, shown and audited
as any other.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import click

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, RequestRefused
from sla_server.cli.formatting import OUTPUT, duration_s, pass_client, print_json
from sla_server.cli.labels import label_values

MOST_S: Final = 400 * 86_400.0
"""The longest that a document may announce (``agreements.periods.MAX_WINDOW_S``); a test compares them."""
_OPTIONS: Final = {
    "metadata.name": "--name",
    "spec.reason": "--reason",
    "spec.duration": "--for",
    "spec.scope.labels": "--labels",
    "spec.scope.volumes": "--volume",
    "spec.scope.agreements": "AGREEMENTS",
}
"""Field of the document -> what of the command line it was made from."""


def _in_words_of_the_command(refused: RequestRefused) -> RequestRefused | BadUsage:
    """The refusal of a document that its author never saw: options instead of lines and fields."""
    errors = refused.problem.get("errors") or []
    lines = []
    for item in errors:
        field = str(item.get("field") or "")
        option = next((name for key, name in _OPTIONS.items() if field.startswith(key)), None)
        if option is None:
            return refused
        fix = f" ({item['fix']})" if item.get("fix") else ""
        lines.append(f"{option}: {item.get('problem')}{fix}")
    return BadUsage(printable_lines("\n  ".join(lines))) if lines else refused


@click.group(cls=Commands)
def maintenance() -> None:
    """Begin maintenance now, or end it early; list it with sla get maintenance.

    While it lasts, slices of the agreements in its scope are not judged.
    """


def _new_name(now_s: float) -> str:
    """Of two works begun in the same second each has its own."""
    at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    return f"work-{at}-{secrets.token_hex(2)}"


@maintenance.command("start")
@click.argument("agreements", nargs=-1)
@click.option(
    "-l",
    "--selector",
    "--labels",
    "labels",
    metavar="LABELS",
    help="Agreements with these labels: KEY=VALUE, several with commas between.",
)
@click.option("--volume", "volumes", multiple=True, help="Whatever is promised of this volume; repeatable.")
@click.option("--for", "lasting", required=True, help="How long at most: 90s, 10m, 2h.")
@click.option("--reason", required=True, help="Why; customers will read it.")
@click.option("--name", help="Of the document [made from the time].")
@OUTPUT
@pass_client
def start(
    client: Client,
    agreements: tuple[str, ...],
    labels: str | None,
    volumes: tuple[str, ...],
    lasting: str,
    reason: str,
    name: str | None,
    output: str,
) -> None:
    """Begin maintenance of AGREEMENTS (names or patterns), or of those that --labels or --volume name."""
    now_s = int(time.time())
    lasts_s = max(1, round(duration_s(lasting, "--for", MOST_S)))
    document = {
        "apiVersion": "storage-sla/v1",
        "kind": "Maintenance",
        "metadata": {"name": name or _new_name(now_s)},
        "spec": {
            "scope": _scope(agreements, labels, volumes),
            "start": datetime.fromtimestamp(now_s, UTC).replace(tzinfo=None).isoformat(),
            "duration": f"{lasts_s}s" if lasts_s < 1_000_000 else f"{-(-lasts_s // 3600)}h",
            "tz": "UTC",
            "reason": reason,
        },
    }
    headers = {"Content-Type": "application/yaml"}
    try:
        answer = client.change("POST", "/slas", content=_yaml(document), headers=headers)
    except RequestRefused as exc:
        raise _in_words_of_the_command(exc) from exc
    if output == "json":
        print_json(answer)
        return
    for item in answer.get("applied", []):
        count = item.get("agreements", 0)
        until = formatting.when((now_s + lasts_s) * 1_000_000)
        words = f"{count} agreement{'' if count == 1 else 's'} in its scope"
        click.echo(f"{item['name']}: until {until}; {words}")
        click.echo(f"To end it early: sla maintenance end {item['name']}")
    for warning in answer.get("warnings", []):
        click.echo(f"note: {printable_lines(str(warning))}", err=True)


def _scope(agreements: tuple[str, ...], labels: str | None, volumes: tuple[str, ...]) -> dict[str, Any]:
    if bool(agreements or labels) == bool(volumes):
        raise BadUsage("say what is maintained: AGREEMENTS or --labels, or else --volume")
    if volumes:
        return {"volumes": list(volumes)}
    scope: dict[str, Any] = {"agreements": list(agreements)} if agreements else {}
    if labels:
        scope["labels"] = label_values(labels)
    return scope


def _yaml(document: dict[str, Any]) -> bytes:
    """The document as people would write it; a value in JSON is YAML."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in document.items()]
    spec = document["spec"].items()
    lines[-1] = "spec:\n" + "\n".join(
        f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in spec
    )
    return ("\n".join(lines) + "\n").encode()


@maintenance.command("end")
@click.argument("name")
@OUTPUT
@pass_client
def end(client: Client, name: str, output: str) -> None:
    """End maintenance now; of work that repeats, this and every occurrence to come."""
    answer = client.change("DELETE", f"/maintenance/{quote(name, safe='')}")
    if output == "json":
        print_json(answer)
        return
    click.echo(f"{name}: ended")
