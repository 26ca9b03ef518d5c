"""What to simulate: agreements, devices, loads and a policy, read and checked before anything runs.

A directory (``--slas``) holds agreements, calendars, maintenance and labels of volumes as ``sla apply`` takes
them (``*.yaml``, ``*.yml``), and at most one ``simulation.yaml`` with ``devices`` (by backend), ``loads``,
``faults`` and ``streams`` (where a trace's volumes are). Nothing is promised outside service hours and in
maintenance, as on the server. Agreements that choose volumes by labels choose among those that are simulated.
A policy (``--policy``) is
JSON: ``{"caps": [{"volume", "hour_of_week", "cost_per_s"}]}``, as ``GET /api/v1/policies/VERSION/caps``
answers, or the bare list.

Pure but for reading files. Raises ``SimulationError`` with file, key and value; nothing is guessed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import Field, ValidationError
from ruamel.yaml import YAML

from pmdaemon.runtime.config import StrictModel, describe
from pmdaemon.wire.rates import LEAST_BURST_S, MOST_BURST_S
from sla_server.agreements.calendars import CalendarDocument, CalendarInForce
from sla_server.agreements.document import Agreement, Applicability
from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.fields import Document
from sla_server.agreements.load import NOT_YAML, load_documents, syntax_problem
from sla_server.agreements.maintenance import AnnouncedWork, MaintenanceDocument
from sla_server.agreements.promise import InForce, Promise, VolumeClass, classes
from sla_server.agreements.volume_labels import LabelBook, VolumeLabelsDocument, VolumeLabelsInForce
from sla_server.services.control.simulation import BACKEND, CLIENT
from sla_server.services.plans import Plans
from sla_server.simulate.device import DeviceModel, Fault
from sla_server.simulate.errors import SimulationError
from sla_server.simulate.loads import NAME, Load

SETUP_FILE: Final = "simulation.yaml"
ROLLUP_S: Final = 1  # slices of any length can be simulated
HOURS_A_WEEK: Final = 168
Model = TypeVar("Model", bound=StrictModel)


class Placement(StrictModel):
    """Where a volume of a trace is."""

    backend: str = Field(default=BACKEND, pattern=NAME)
    gateway: str = Field(default="gateway-1", pattern=NAME)
    client: str | None = Field(default=None, pattern=NAME)
    """Whose requests a trace without clients has."""


class SetupFile(StrictModel):
    """``simulation.yaml``."""

    devices: dict[str, DeviceModel] = Field(default_factory=dict)
    """Backend to its device; ``disk`` is the backend of whatever names none."""
    loads: list[Load] = Field(default_factory=list)
    streams: dict[str, Placement] = Field(default_factory=dict)
    """Volume of a trace to its backend and gateway, and to its client."""
    faults: list[Fault] = Field(default_factory=list)
    """Times in which backends hang or fail."""


class PolicyRow(StrictModel):
    """One cap of a policy; other columns of the server's answer are not needed here."""

    volume: str
    hour_of_week: int = Field(ge=0, lt=HOURS_A_WEEK)
    cost_per_s: float | None = Field(default=None, gt=0)
    burst_s: float | None = Field(default=None, ge=LEAST_BURST_S, le=MOST_BURST_S)


@dataclass(frozen=True)
class Contract:
    """The agreements of a simulation, as control and judging need them."""

    promises: Sequence[Promise] = ()
    classes: Sequence[VolumeClass] = ()
    clauses: Mapping[tuple[str, str], Applicability] = field(default_factory=dict)
    """(agreement, objective) to its applicability."""
    excusable: Mapping[str, InForce] = field(default_factory=dict)
    """Agreements with service hours or announced work, by name: at times nothing is promised."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Agreements with a mode of their own (``control``), by name."""

    def excused(self, sla: str, from_us: int, to_us: int) -> str | None:
        """Why nothing is promised by an agreement in a slice, us UTC; None: the promise holds."""
        item = self.excusable.get(sla)
        return None if item is None else item.excluded(from_us, to_us)

    def excused_at(self, at_us: int) -> dict[str, str]:
        """Agreements of which nothing is promised at this instant, and why."""
        found = ((name, item.excluded(at_us)) for name, item in self.excusable.items())
        return {name: reason for name, reason in found if reason is not None}

    @property
    def notes(self) -> list[str]:
        """What the reader of the result must know."""
        found = []
        for mode, does in (("observe", "only logs"), ("enforce", "acts")):
            names = ", ".join(name for name, own in self.modes.items() if own == mode)
            if names:
                found.append(f"control: {mode} of {names}: for it control {does} in both modes.")
        return found


@dataclass(frozen=True)
class Stream:
    """One client's use of one volume."""

    volume: str
    client: str = CLIENT
    gateway: str = "gateway-1"
    backend: str = BACKEND


def contract_of(
    agreements: Sequence[Agreement], plans: Plans | None = None, labels: LabelBook | None = None
) -> Contract:
    """Documents, compiled.

    Args:
        agreements: of them.
        plans: maintenance and calendars beside them.
        labels: of volumes, by which agreements may choose them.
    """
    book = labels or LabelBook()
    items = tuple(InForce(agreement, 1, 0).with_labels(book) for agreement in agreements)
    in_force = (plans or Plans()).attach_all(items)
    clauses = {(a.name, o.name): o.applicability for a in agreements for o in a.judged}
    excusable = {item.name: item for item in in_force if item.may_be_excluded}
    modes = {a.name: mode for a in agreements if (mode := a.spec.control)}
    promises = [promise for item in in_force for promise in item.all_promises]
    return Contract(promises, classes(in_force), clauses, excusable, modes)


@dataclass(frozen=True)
class Folder:
    """What a directory says: agreements, the documents beside them, and ``simulation.yaml``."""

    path: Path
    agreements: Sequence[Agreement]
    plans: Plans
    setup: SetupFile

    def contract(self, volumes: Iterable[str], known: LabelBook | None = None) -> Contract:
        """Its agreements about these volumes; ``known``: what is said of labels elsewhere.

        Raises:
            SimulationError: an agreement chooses volumes by labels, and none has them.
        """
        known, own = known or LabelBook(), {each.name for each in self.plans.labels}
        documents = (*self.plans.labels, *(each for each in known.documents if each.name not in own))
        book = LabelBook(known.announced, documents, known.volumes.union(volumes))
        for agreement in self.agreements:
            scope = agreement.spec.scope
            if scope.volume_labels is not None and not book.in_scope(scope):
                problem = (
                    f"agreement {agreement.name} chooses volumes by labels ({scope.volume_labels}), which "
                )
                names = ", ".join(sorted(book.volumes)) or "none"
                fix = "Give them labels in a VolumeLabels document beside the agreements"
                raise SimulationError(str(self.path), f"{problem}none has that is simulated: {names}", fix)
        return contract_of(self.agreements, self.plans, book)


def read_directory(directory: Path) -> Folder:
    """Agreements and ``simulation.yaml`` of a directory.

    Raises:
        SimulationError: a file is wrong, or there is no agreement.
        OSError: it cannot be read.
    """
    if not directory.is_dir():
        raise SimulationError(
            str(directory), "is not a directory", "--slas names a directory with agreements"
        )
    setup, found = SetupFile(), dict[str, tuple[str, Agreement]]()
    plans = Plans()
    for path in sorted(p for p in directory.iterdir() if p.suffix in (".yaml", ".yml")):
        if path.name == SETUP_FILE:
            setup = _validated(SetupFile, _tree(path), str(path))
            continue
        try:
            loaded = load_documents(path.read_text(encoding="utf-8-sig"), ROLLUP_S)
        except UnicodeDecodeError as exc:
            raise SimulationError(str(path), f"is not UTF-8 ({exc.reason} at byte {exc.start})") from None
        except AgreementsRefused as exc:
            raise SimulationError(str(path), "\n  ".join(["refused", *map(str, exc.problems)])) from exc
        plans = _with_documents(plans, [item.document for item in loaded])
        for agreement in (item.document for item in loaded if isinstance(item.document, Agreement)):
            if agreement.name in found:
                other = found[agreement.name][0]
                raise SimulationError(str(path), f"agreement {agreement.name} is in {other}, too", "Keep one")
            found[agreement.name] = path.name, agreement
    if not found:
        raise SimulationError(str(directory), "holds no agreement (*.yaml)", "See docs/formats/agreement.md")
    agreements = [agreement for _, agreement in found.values()]
    _check(directory, agreements, plans)
    return Folder(directory, agreements, plans, setup)


def _with_documents(plans: Plans, documents: Iterable[Document]) -> Plans:
    works, calendars, labels = plans.works, plans.calendars, plans.labels
    for document in documents:
        if isinstance(document, MaintenanceDocument):
            works = (*works, AnnouncedWork(document, 1, 0))
        elif isinstance(document, CalendarDocument):
            calendars = (*calendars, CalendarInForce(document, 1, 0))
        elif isinstance(document, VolumeLabelsDocument):
            labels = (*labels, VolumeLabelsInForce(document, 1, 0))
    return Plans(works, calendars, labels=labels)


def _check(directory: Path, agreements: Sequence[Agreement], plans: Plans) -> None:
    """See that the calendars that are named are there."""
    for agreement in agreements:
        hours = agreement.spec.service_hours
        if hours is not None and hours.is_named and hours.calendar not in plans.calendar_names():
            problem = f"agreement {agreement.name} names the calendar {hours.calendar}, which is not in it"
            raise SimulationError(str(directory), problem, "Put the Calendar document beside the agreements")


def read_device(path: Path) -> DeviceModel:
    """A device from a YAML or TOML file.

    Raises:
        SimulationError: it is wrong.
        OSError: it cannot be read.
    """
    if path.suffix != ".toml":
        return _validated(DeviceModel, _tree(path), str(path))
    try:
        return _validated(DeviceModel, tomllib.loads(path.read_text(encoding="utf-8-sig")), str(path))
    except (ValueError, RecursionError) as exc:
        raise SimulationError(str(path), f"is not TOML: {exc}") from None


def check_placement(streams: Iterable[Stream]) -> None:
    """See that a volume is on one backend at each gateway.

    Raises:
        SimulationError: it is on two.
    """
    backends: dict[tuple[str, str], str] = {}
    for stream in streams:
        known = backends.setdefault((stream.gateway, stream.volume), stream.backend)
        if known != stream.backend:
            where = f"volume {stream.volume} at gateway {stream.gateway}"
            problem = f"is on two backends, {known} and {stream.backend}"
            raise SimulationError(where, problem, "Give its loads the same backend, or different gateways")


def check_faults(faults: Iterable[Fault], backends: Iterable[str]) -> None:
    """See that backends at fault are there, and have one fault at a time.

    Raises:
        SimulationError: one is not, or has two.
    """
    known, until_s = sorted(backends), dict[str, float]()
    for fault in sorted(faults, key=lambda each: each.from_s):
        where = f"fault of backend {fault.backend} from {fault.from_s:g} s"
        if fault.backend not in known:
            raise SimulationError(where, "no volume is on it", f"Backends are {', '.join(known)}")
        if fault.from_s < until_s.get(fault.backend, 0.0):
            raise SimulationError(where, "the one before has not ended", "Give them different times")
        until_s[fault.backend] = fault.ends_s


def check_clients(contract: Contract, unnamed: Iterable[Stream]) -> None:
    """See that a trace without clients has no volume that an agreement divides by clients.

    Args:
        contract: the agreements.
        unnamed: streams whose trace does not say whose they are.

    Raises:
        SimulationError: what was promised to some clients would be promised to no request, or to all.
    """
    for stream in unnamed:
        for each in contract.classes:
            if "*" in each.clients or not each.has_volume(stream.volume):
                continue
            clients = ", ".join(each.clients)
            problem = f"agreement {each.sla} is about the clients {clients}, and the trace names none"
            fix = (
                f"Say whose its requests are with streams: {{{stream.volume}: {{client: NAME}}}} in "
                f"{SETUP_FILE}, or give a trace with the column client"
            )
            raise SimulationError(f"volume {stream.volume}", problem, fix)


def parse_load(text: str) -> Load:
    """A load of the command line: ``volume=greedy,shape=square,depth=32``.

    Raises:
        SimulationError: it is wrong.
    """
    return _parsed(Load, "--load", text, "volume=greedy,depth=32")


def parse_fault(text: str) -> Fault:
    """A fault of the command line: ``kind=hangs,from_s=30,until_s=60``.

    Raises:
        SimulationError: it is wrong.
    """
    return _parsed(Fault, "--fault", text, "kind=hangs,from_s=30")


def _parsed(model: type[Model], option: str, text: str, example: str) -> Model:
    where, tree = f"{option} {text}", dict[str, str]()
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            last = list(tree)[-1] if tree else ""
            if last and part.isdecimal() and tree[last].isdecimal():
                problem = f"{last}={tree[last]},{part}: a comma ends a value"
                raise SimulationError(where, problem, f"Write {last}={tree[last]}{part}")
            raise SimulationError(where, f"{part!r} is not key=value", f"Write for example {example}")
        tree[key.strip()] = value.strip()
    return _validated(model, tree, where)


def read_policy(path: Path) -> tuple[dict[int, dict[str, float | None]], dict[int, dict[str, float]]]:
    """Hour of the week (0 = Monday 00 UTC) to volume to cost rate (None: no cap), and to its burst (s).

    Raises:
        SimulationError: it is wrong.
        OSError: it cannot be read.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise SimulationError(str(path), f"is not JSON: {exc}") from None
    rows = tree
    if isinstance(tree, dict):
        if tree.get("next"):
            raise SimulationError(str(path), "is one page of several", "Ask for it with a larger limit")
        rows = next((tree[key] for key in ("caps", "items", "rows") if key in tree), None)
    if not isinstance(rows, list) or not rows:
        fix = "Write a list of {volume, hour_of_week, cost_per_s}"
        raise SimulationError(str(path), "holds no list of caps", fix)
    caps: dict[int, dict[str, float | None]] = {}
    bursts: dict[int, dict[str, float]] = {}
    for number, row in enumerate(rows):
        kept = (
            {key: row[key] for key in PolicyRow.model_fields if key in row} if isinstance(row, dict) else row
        )
        cap = _validated(PolicyRow, kept, f"{path}: caps[{number}]")
        caps.setdefault(cap.hour_of_week, {})[cap.volume] = cap.cost_per_s
        if cap.burst_s is not None:
            bursts.setdefault(cap.hour_of_week, {})[cap.volume] = cap.burst_s
    return caps, bursts


def _tree(path: Path) -> Any:
    try:
        tree = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as exc:
        raise SimulationError(str(path), f"is not UTF-8 ({exc.reason} at byte {exc.start})") from None
    except NOT_YAML as exc:
        problem = syntax_problem(exc)
        line = f"line {problem.line}: " if problem.line else ""
        raise SimulationError(str(path), f"{line}{problem.problem}", problem.fix) from None
    return {} if tree is None else tree


def _validated(model: type[Model], tree: Any, where: str) -> Model:
    try:
        return model.model_validate(tree)
    except ValidationError as exc:
        problem = describe(exc).replace("(whole file): ", "")
        problem = problem.replace(f"does not have the form {NAME}", _NO_NAME)
        raise SimulationError(where, problem, "See docs/operations/simulate.md") from None


_NO_NAME: Final = "is not a name (letters, digits and . _ : @ -, at most 128)"
