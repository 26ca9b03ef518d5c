"""``sla get``: what the server knows, as tables or for programs.

``GetRequest`` is what the command line asks for, checked before anything is sent. Rows come in pages where
there may be many; ``--since`` ends them at a time, ``--limit`` at a number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any, Final
from urllib.parse import quote
from zoneinfo import ZoneInfo

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting, notifications
from sla_server.cli.client import Client
from sla_server.cli.completion import kind_or_name, names_of_kind
from sla_server.cli.errors import BadUsage, LiveValuesMissing, RequestRefused
from sla_server.cli.formatting import OUTPUT, TableKind, build, console, pass_client, print_json
from sla_server.cli.kinds import KindType, bare_name, named_with_kind, near, singular_of
from sla_server.cli.labels import check_labels
from sla_server.cli.moments import moment_us, spans_us
from sla_server.cli.output import form, set_naming
from sla_server.cli.system_tables import ZONE, trend_rows
from sla_server.cli.table_notes import notes_of
from sla_server.cli.tables import KINDS, by_objective
from sla_server.cli.watch import watchable
from sla_server.rows import Row

LIMIT_DEFAULT: Final = 20
DOCUMENTS: Final = ("slas", "maintenance", "calendars", "volumelabels", "recipients", "routes", "silences")
"""Kinds whose rows are documents."""
LABELLED: Final = ("volumes", "slas", "episodes", "throttles")
"""Kinds that are selected by labels: volumes by their own, the others by those of agreements."""
OF_OBJECTIVES: Final = ("slices", "periods", "hours", "episodes", "trend")
SORTED: Final = ("jobs", "policies", "promises")
"""Kinds that the server sorts, and filters by state."""
INBOX_OF: Final = {
    "events": ("severity", "kind", "subject"),
    "jobs": ("kind", "subject"),
    "policies": ("subject",),
    "decisions": ("kind",),
}
"""Filters that kinds take."""
NARROWED: Final = ("episodes", "decisions")
"""Kinds of which a name is an agreement or volume that they are about; the server looks for it."""
SPANNED: Final = ("rates", "loads", "clients", "decisions", "slices")
"""Kinds that the API answers for a span of time, which has a greatest length."""
_MOST_LISTED: Final = 1000
_SLICES_MOST: Final = 5000
_PERIODS_MOST: Final = 60


@dataclass(frozen=True, slots=True)
class GetRequest:
    """What is asked for.

    Attributes:
        names: only these things; of slices, periods, streams, clients, rates and loads what they are of.
        since_us: only what began since then.
        inbox: filters of events, as /inbox takes them; without any, all events come. The last two of jobs and
            policies, too.
        state, sort: of jobs and policies.
    """

    kind: str
    names: tuple[str, ...] = ()
    limit: int | None = None
    labels: str | None = None
    objective: str | None = None
    episode: str | None = None
    since_us: int | None = None
    is_open: bool = False
    inbox: dict[str, str] = field(default_factory=dict)
    state: str | None = None
    sort: str | None = None

    @property
    def listed(self) -> TableKind:
        """The kind's table."""
        return KINDS[self.kind]

    def spans(self) -> list[dict[str, int]]:
        """Parts of the time asked for, as parameters, the oldest first; one without any by default."""
        if self.since_us is None or self.kind not in SPANNED:
            return [{}]
        return spans_us(self.since_us, time.time_ns() // 1000)

    def check(self) -> None:
        """See that every option has a use with this kind.

        Raises:
            BadUsage: one has none, or a name is missing.
        """
        kind, listed = self.kind, self.listed
        if self.labels is not None:
            if kind not in LABELLED:
                raise BadUsage(f"{kind} have no labels; by label are selected: {', '.join(LABELLED)}")
            check_labels(self.labels)
        if self.episode is not None and kind != "slices":
            raise BadUsage(f"--episode has no use with {kind}. Use it with: sla get slices AGREEMENT")
        if self.objective is not None and kind not in OF_OBJECTIVES:
            raise BadUsage(
                f"--objective has no use with {kind}; it is for slices, periods, hours and episodes"
            )
        if self.since_us is not None and not listed.time:
            timed = ", ".join(name for name, one in KINDS.items() if one.time)
            raise BadUsage(f"--since has no use with {kind}; it is for {timed}")
        if self.is_open and kind not in ("episodes", "events"):
            raise BadUsage(f"--open has no use with {kind}; it is for episodes and events")
        useless = set(self.inbox) - set(INBOX_OF.get(kind, ()))
        if useless:
            raise BadUsage(
                f"--severity, --kind and --about have no use with {kind}; they are for events, the last "
                "two for jobs, --about for policies, --kind for decisions"
            )
        if kind == "clients" and len(self.spans()) > 1:
            raise BadUsage("rates of clients are averages of 31 days at most: give a later --since")
        if kind == "decisions" and len(self.names) > 1:
            raise BadUsage("decisions are of all volumes, or of one: sla get decisions VOLUME")
        if (self.state or self.sort) and kind not in SORTED:
            raise BadUsage(f"--state and --sort have no use with {kind}; they are for {', '.join(SORTED)}")
        if self.sort and self.since_us is not None:
            raise BadUsage("--sort has no use with --since, which reads from the newest on; give one of them")
        if listed.needs_name and len(self.names) != 1:
            fix = f"sla get {kind} {listed.of}" + (
                ", or AGREEMENT/OBJECTIVE; sla get slas lists them" if listed.of == "AGREEMENT" else ""
            )
            said = "none is named" if not self.names else "one is named at a time"
            thing = listed.of.lower()
            raise BadUsage(f"{kind} are those of one {thing}, and {said}: {fix}")


@click.command()
@click.argument("kind", type=KindType(list(KINDS)), metavar="KIND", shell_complete=kind_or_name(list(KINDS)))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=names_of_kind)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    help="At most so many [20 of kinds that are listed newest first; all of the others].",
)
@click.option(
    "-l",
    "--selector",
    "--labels",
    "labels",
    metavar="LABELS",
    help="volumes: those with these labels, as tier=gold,env in (a,b); slas, episodes, throttles: those of "
    "agreements with them.",
)
@click.option("--since", metavar="TIME", help="Only what began since then: 2h, 14:03, '2026-11-22 14:03'.")
@click.option("--objective", help="slices, periods, hours, episodes: only of this objective [all].")
@click.option("--episode", help="slices: those that this episode touches (see sla get episodes).")
@click.option(
    "--tz",
    metavar="ZONE",
    help="Zone of the times: UTC, Europe/Berlin, local [slices, periods: that of the agreement; else local].",
)
@click.option("--state", help="promises, jobs, policies: in this state; several with commas between.")
@click.option(
    "--sort",
    help="promises: trouble, name, budget, compliance, burn; jobs: newest, oldest, longest, rows, state.",
)
@click.option("--severity", help="events: info, warning or critical; several with commas between.")
@click.option(
    "--kind",
    "event_kind",
    metavar="PATTERN",
    help="events, jobs: of this kind; * matches anything. decisions: of these kinds.",
)
@click.option("--about", metavar="TEXT", help="events, jobs, policies: those with this text in them.")
@click.option("--open", "is_open", is_flag=True, help="episodes, events: only those that go on.")
@click.option("--undelivered", is_flag=True, help="events: those that not all recipients have confirmed.")
@OUTPUT
@pass_client
@watchable
def get(
    client: Client,
    kind: str,
    names: tuple[str, ...],
    limit: int | None,
    output: str,
    labels: str | None = None,
    since: str | None = None,
    objective: str | None = None,
    episode: str | None = None,
    tz: str | None = None,
    severity: str | None = None,
    event_kind: str | None = None,
    about: str | None = None,
    is_open: bool = False,
    undelivered: bool = False,
    state: str | None = None,
    sort: str | None = None,
) -> None:
    """List gateways, volumes, slas, maintenance, throttles, events and more.

    KIND is one of gateways, volumes, pools, backends, slas, promises, throttles, events, policies, jobs,
    processes, nodes, maintenance, calendars, volumelabels, recipients, routes and silences; of the past
    episodes, decisions, slices, periods, hours, clients, rates, loads and trend. The singular does, too.
    With NAME only the ones of that name are listed; KIND/NAME does as well.

    Promises are the objectives of all agreements, the worst first: since when, for whom, and what is measured
    now; --sort budget, compliance or burn shows the period instead, as slas do. Slices (judged
    pieces of time, the newest), periods and hours (of the period that goes on) are those of one agreement:
    sla get slices AGREEMENT[/OBJECTIVE]. Episodes (a promise is broken, until it is kept again) are those of
    all, or of one.
    Decisions (what control did, and why) are those of the last day, of all volumes or of one.
    Clients (their rates and latencies, on average over the last hour or --since), streams (what they did
    in all) and rates (what was stored, slot by slot) are those of one volume, loads (how much
    its volumes used) those of one backend. The trend is the last 15 minutes of all promises, or of one.

    Counts of I/Os are exact (from the database); rates, latencies and states are those of the last seconds.
    """
    names = (*named_with_kind(), *(bare_name(kind, name) for name in names))
    set_naming(singular_of(kind), lambda row: _name_of(kind, row))
    if undelivered:
        notifications.show_undelivered(client, kind, limit or LIMIT_DEFAULT, output)
        return
    if tz is not None:
        formatting.zone_of(tz)  # or say so before anything is asked
    inbox = {"severity": severity, "kind": event_kind, "subject": about}
    request = GetRequest(
        kind,
        names,
        limit,
        labels,
        objective,
        episode,
        None if since is None else moment_us(since, time.time_ns() // 1000, "--since"),
        is_open,
        {key: value for key, value in inbox.items() if value},
        state,
        sort,
    )
    request.check()
    if form() == "yaml" and kind in DOCUMENTS:
        output = "yaml"  # as they are applied
    if kind in JUDGED:
        _get_judged(client, request, output, tz)
        return
    rows, silence, nothing = _answer(client, request, wants_documents=output == "yaml")
    _show_rows(request, rows, output, tz, nothing)
    if silence:
        raise LiveValuesMissing(silence)


def _name_of(kind: str, row: Row) -> str:
    """The name by which commands take it."""
    return formatting.throttled(row) if kind == "throttles" else str(row.get(KINDS[kind].key) or "")


def _answer(client: Client, request: GetRequest, *, wants_documents: bool) -> tuple[list[Row], str, str]:
    """The rows that are asked for; why live values are missing, "" if they are there; why there is no row."""
    kind, listed, names = request.kind, request.listed, request.names
    if kind == "events" and names:
        return [client.get(f"/events/{quote(name, safe='')}") for name in names], "", ""
    if kind == "trend":
        found = trend_rows(client.get(listed.path))
        wanted = f"{names[0]}/{request.objective}" if names and request.objective else "".join(names[:1])
        return [row for row in found if _is_of(row["name"], wanted) and _is_since(request, row)], "", ""
    path, query = _path_of(request, wants_documents=wants_documents)
    pages = list(_pages(client, request, path, query))
    answer = pages[-1]
    rows = [row for page in pages for row in page[listed.rows] if _is_since(request, row)]
    if request.labels and kind not in ("slas", "volumes"):
        chosen = {row["name"] for row in client.get("/slas", labels=request.labels)["items"]}
        rows = [row for row in rows if _agreement_of(kind, row) in chosen]
    if names and not listed.needs_name and kind not in NARROWED:
        rows = _named(client, request, rows, query.get("match"))
    if kind == "loads":
        of_all = {key: max(page[key] for page in pages) for key in ("others", "read_every")}
        rows = [{**row, **of_all} for row in rows]
    if kind == "clients":
        rows = [{**row, "read_every": answer["read_every"]} for row in rows]
    if kind in ("rates", "loads"):
        rows.reverse()
    silence = "" if wants_documents else formatting.silence_of(answer.get("server") or {})
    return rows, silence, answer.get("note") or ""


def _named(client: Client, request: GetRequest, rows: list[Row], match: str | None) -> list[Row]:
    """Of ``rows`` those of the names; none of a thing that exists, but fits no filter.

    Raises:
        RequestRefused: one of them does not exist.
    """
    kind, listed, names = request.kind, request.listed, request.names
    try:
        return of_names(kind, rows, names)
    except RequestRefused:
        if match is None:
            raise
    for query in {"match": match}, {}:  # the second one for names like it
        try:
            of_names(kind, client.get(listed.path, **query, limit=_MOST_LISTED)[listed.rows], names)
        except RequestRefused:
            if not query:
                raise
        else:
            return []
    return []


def _is_of(name: str, wanted: str) -> bool:
    return not wanted or name == wanted or name.startswith(f"{wanted}/")


def _is_since(request: GetRequest, row: Row) -> bool:
    return request.since_us is None or (row.get(request.listed.time) or 0) >= request.since_us


def _agreement_of(kind: str, row: Row) -> str:
    """The agreement that an episode is of, or that a throttle helps."""
    return str(row.get("name") if kind == "episodes" else str(row.get("victim") or "").partition("/")[0])


def _path_of(request: GetRequest, *, wants_documents: bool) -> tuple[str, dict[str, Any]]:
    """Path and query."""
    kind, listed, names = request.kind, request.listed, request.names
    query: dict[str, Any] = {}
    if kind == "volumes":
        query |= {"labels": request.labels} if request.labels else {}
    if kind == "clients":
        query["limit"] = request.limit or _MOST_LISTED
    if kind == "slas":
        query |= {"labels": request.labels} if request.labels else {}
        query |= {"documents": "1"} if wants_documents else {}
        query |= {"match": names[0]} if len(names) == 1 else {}
    if kind == "episodes":
        agreement, objective = _split("".join(names[:1]), request.objective)
        asked = {"name": agreement, "objective": objective, "open": "1" if request.is_open else ""}
        query |= {key: value for key, value in asked.items() if value}
    if kind == "events" and (request.inbox or request.is_open):
        return "/inbox", {**request.inbox, **({"open": "1"} if request.is_open else {})}
    if kind == "promises":
        asked = {"match": names[0].partition("/")[0] if len(names) == 1 else ""}
        states = ",".join(formatting.state_code(each) for each in (request.state or "").split(","))
        asked |= {"state": states, "sort": request.sort}
        query |= {key: value for key, value in asked.items() if value}
    if kind in ("jobs", "policies"):
        asked = {"match": request.inbox.get("subject"), "kind": request.inbox.get("kind")}
        asked |= {"state": request.state, "sort": request.sort}
        query |= {key: value for key, value in asked.items() if value}
    if kind == "decisions":
        asked = {"volume": "".join(names[:1]), "kind": request.inbox.get("kind")}
        query |= {key: value for key, value in asked.items() if value}
    return listed.path.replace("{name}", quote("".join(names[:1]), safe="")), query


def _split(name: str, objective: str | None) -> tuple[str, str | None]:
    """AGREEMENT/OBJECTIVE in its parts.

    Raises:
        BadUsage: --objective names another one.
    """
    agreement, _, named = name.partition("/")
    if named and objective is not None and named != objective:
        raise BadUsage(f"{name} names an objective, --objective {objective} another one; give one of them")
    return agreement, named or objective


def _pages(client: Client, request: GetRequest, path: str, query: dict[str, Any]) -> Iterator[Row]:
    """Answers, until there are enough rows, or they are too old."""
    if request.kind == "promises":
        # Of names: the first of all that match may be of others.
        yield from _by_offset(client, path, query, None if request.names else request.limit)
        return
    if not request.listed.is_paged:
        for span in request.spans():
            yield client.get(path, **query, **span)
        return
    is_picked = bool(request.names or request.labels) and request.kind not in NARROWED
    has_all = is_picked or request.since_us is not None
    wanted = request.limit or (_MOST_LISTED if is_picked else LIMIT_DEFAULT)
    query["limit"] = _MOST_LISTED if has_all else wanted
    count = 0
    for span in reversed(request.spans()):
        following: str | None = ""
        while following is not None and (request.limit or count + 1) > count:
            answer = client.get(path, **query, **span, **({"before": following} if following else {}))
            rows = answer["items"]
            yield answer
            count += len(rows)
            is_old = bool(rows) and not _is_since(request, rows[-1])
            following = None if is_old or request.since_us is None else answer.get("next")


def _by_offset(client: Client, path: str, query: dict[str, Any], limit: int | None) -> Iterator[Row]:
    """Pages of a list that the server sorts, until there are enough rows."""
    offset, wanted = 0, limit or 0
    while True:
        most = min(wanted - offset, _MOST_LISTED) if wanted else _MOST_LISTED
        answer = client.get(path, **query, limit=most, offset=offset)
        yield answer
        offset += len(answer["items"])
        if not answer["next"] or (wanted and offset >= wanted):
            return


def _show_rows(request: GetRequest, rows: list[Row], output: str, tz: str | None, nothing: str) -> None:
    kind, listed, limit = request.kind, request.listed, request.limit
    zone = formatting.zone_of(tz or formatting.LOCAL)
    left_out = 0 if limit is None else max(0, len(rows) - limit)
    rows = rows[: len(rows) - left_out]
    if output == "json":
        print_json(rows)
        return
    if not rows:
        click.echo(fill(nothing or _nothing(request), formatting.WIDTH, break_on_hyphens=False))
        return
    if output == "yaml":
        from sla_server.cli.documents import join_documents  # it needs the YAML reader, which lists do not

        click.echo(join_documents(str(row["document"]) for row in rows), nl=False)
        return
    shown = by_objective(rows) if kind == "slas" else rows
    _show(listed, shown, zone, request.sort)
    for line in notes_of(kind, shown, request.sort):
        click.echo(line)
    if tz is not None:
        click.echo(f"Times are {_zone_words(tz)}.")
    if left_out:
        click.echo(f"and {left_out:,} more: give a higher --limit, or none")
    elif kind in ("rates", "loads") and request.since_us is not None:
        begun_us, length_us = rows[-1]["slot_us"], rows[-1]["length_us"]
        if begun_us - request.since_us > length_us:
            click.echo(f"Nothing is stored of it before {formatting.when(begun_us, zone)}.")


def _nothing(request: GetRequest) -> str:
    """Why there is nothing to show, and what to do."""
    if request.labels and request.kind == "volumes":
        return f"No volume has the labels {request.labels}. Give some: sla volumes label VOLUME KEY=VALUE"
    if request.labels and request.kind == "slas":
        return f"No agreement in force has the labels {request.labels}."
    is_filtered = bool(request.inbox or request.is_open or request.state)
    if request.labels or request.since_us or is_filtered:
        asked = ["the labels" if request.labels else "", "the time" if request.since_us else ""]
        asked.append("the filters" if is_filtered else "")
        return f"No {singular_of(request.kind)} fits {' and '.join(filter(None, asked))} asked for."
    return request.listed.empty


def _show(listed: TableKind, rows: Sequence[Row], zone: ZoneInfo | None, order: str | None = None) -> None:
    shown = [{**row, ZONE: zone} for row in rows]
    columns = listed.sorted_columns.get(order or "", listed.columns)
    console().print(build(columns, shown, time.time_ns() // 1000))


def _zone_words(tz: str) -> str:
    return "this machine's" if tz == formatting.LOCAL else f"of {tz}"


def of_names(kind: str, rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of these things: of a volume also the throttles of its clients and of its group.

    Raises:
        RequestRefused: there is none of one of the names.
    """
    key = KINDS[kind].key
    found: list[Row] = []
    for name in names:
        known = [
            row
            for row in rows
            if name
            in (
                str(row.get(key)),
                f"{row.get('name')}/{row.get('objective')}",
                str(row.get("throttle_id")),
                formatting.throttled(row),
                *(row.get("members") or ()),
            )
        ]
        if not known:
            there = dict.fromkeys(str(row[key]) for row in rows if row.get(key))
            fix = near(name, there) or f"'sla get {kind}' lists what there is"
            problem = f"no {singular_of(kind)} {name[:200]!r} is listed"
            raise RequestRefused(404, {"detail": problem, "fix": fix})
        found += [row for row in known if row not in found]
    return found


def _get_judged(client: Client, request: GetRequest, output: str, tz: str | None) -> None:
    """Slices, periods or hours: of one objective after the other, each in a table of its own."""
    kind = request.kind
    name, objective = _split(request.names[0], request.objective)
    path = request.listed.path.replace("{name}", quote(name, safe=""))
    asked = {"objective": objective, "episode": request.episode}
    query: dict[str, Any] = {key: value for key, value in asked.items() if value}
    agreement = client.get(path.rpartition("/")[0])
    spec = (agreement.get("spec") or {}).get("spec") or {}
    names = [str(one["name"]) for one in spec.get("objectives") or []]
    if "episode" in query:
        names = [""]  # that of the episode
    elif "objective" in query:
        names = [query["objective"]]
    agreed = (spec.get("window") or {}).get("tz") or "UTC"
    tz, zone = (tz, formatting.zone_of(tz)) if tz else (agreed, ZoneInfo(agreed))
    found: list[tuple[str, list[Row]]] = []
    for each in names:
        one = {**query, "objective": each} if each else query
        rows = JUDGED[kind](client, path, one, request)
        found.append((each, [{"objective": each, **row} for row in rows]))
    if output == "json":
        print_json([row for _, rows in found for row in rows])
        return
    if not any(rows for _, rows in found):
        unjudged = f"{agreement['name']} has no objective: nothing of it is judged."
        click.echo(KINDS[kind].empty if names else printable_lines(unjudged))
        for line in _long_slices(spec, names) if kind == "slices" else ():
            click.echo(line)
        return
    for each, rows in found:
        if len(found) > 1:
            click.echo(printable_lines(f"{agreement['name']}/{each}" + ("" if rows else ": nothing judged")))
        if rows:
            _show(KINDS[kind], rows, zone)
        for line in _parts_of(rows, zone) if kind == "periods" else ():
            click.echo(line)
        if len(found) > 1:
            click.echo()
    click.echo(f"Times are {_zone_words(tz)}.")


def _long_slices(spec: Row, names: Sequence[str]) -> Iterator[str]:
    """Objectives with slices so long that the first one may not have ended."""
    for one in spec.get("objectives") or []:
        length = str((one.get("budgeting") or {}).get("slice"))
        if one.get("name") in names and length.endswith(("h", "d")):
            yield printable_lines(
                f"A slice of {one['name']} is {length} long, and is judged when it has ended."
            )


def _parts_of(rows: Sequence[Row], zone: ZoneInfo | None) -> Iterator[str]:
    """Of periods in which the slice length was edited: what their ratios rest on."""
    for row in rows:
        if len(row.get("slice_lengths_s") or []) > 1:
            yield f"{formatting.day(row['from_us'], zone)}: {formatting.due_of(row)}."


def _periods_of(client: Client, path: str, query: dict[str, Any], request: GetRequest) -> list[Row]:
    """The newest periods that had not ended before --since; newest first."""
    most = {"limit": min(request.limit, _PERIODS_MOST)} if request.limit else {}
    rows: list[Row] = client.get(path, **query, **most)["items"]
    return [row for row in rows if _is_since(request, row)]


def _slices_of(client: Client, path: str, query: dict[str, Any], request: GetRequest) -> list[Row]:
    """The newest slices of the last day, or all of an episode or since a time; newest first."""
    rows: list[Row] = []
    for span in request.spans():
        page = client.get(path, **query, **span, limit=_SLICES_MOST)
        rows += page["items"]
        while page["next"] is not None:
            page = client.get(path, **{**query, **span, "from_us": page["next"]}, limit=_SLICES_MOST)
            rows += page["items"]
    rows.reverse()
    has_all = request.limit is None and ("episode" in query or request.since_us is not None)
    return rows if has_all else rows[: request.limit or LIMIT_DEFAULT]


def _hours_of(client: Client, path: str, query: dict[str, Any], request: GetRequest) -> list[Row]:
    """Hours of the period that goes on; newest first."""
    answer = client.get(path, **query)
    whole = {key: answer[key] for key in ("target", "compliance", "coverage", "budget_s", "judged_us", "tz")}
    rows = [{**whole, **row} for row in answer["items"] if _is_since(request, row)]
    rows.reverse()
    return (
        rows if request.since_us is not None and not request.limit else rows[: request.limit or LIMIT_DEFAULT]
    )


JUDGED: Final = {"slices": _slices_of, "periods": _periods_of, "hours": _hours_of}
"""Kinds whose rows are what was judged of an objective, and what reads them."""
