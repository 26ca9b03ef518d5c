"""OpenSLO documents tried one by one: imported, filled in, accepted, exported and imported again.

``python -m tests.support.openslo_examples FOLDER`` tries those of a folder, such as a copy of the OpenSLO
project's repository: all its YAML files, and what stands in its Markdown between fences. It prints what
became of each, and ends with 1 if one of them could not be taken. The suite tries ``tests/fixtures/openslo``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import load_documents
from sla_server.agreements.openslo import API_VERSION, Converted, from_openslo, to_openslo

OURS: Final = Path(__file__).parents[1] / "fixtures" / "openslo"
FENCE: Final = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILLED: Final[dict[str, Any]] = {"volumes": ["vol-1"], "demand_curve": [{"value_ms": 10}], "period": "month"}
"""What a person writes into keys that were left empty."""


@dataclass(frozen=True)
class Tried:
    """One text: the agreements that came of it once they were filled in, and what was said of the rest."""

    name: str
    agreements: list[Agreement]
    unmapped: list[str]


def examples(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    """(name, parsed objects) of every text in it that has an SLO of this version."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".yaml", ".yml"):
            texts = [path.read_text(encoding="utf-8")]
        elif path.suffix == ".md":
            texts = FENCE.findall(path.read_text(encoding="utf-8"))
        else:
            continue
        for number, text in enumerate(texts):
            try:
                objects = list(YAML(typ="safe", pure=True).load_all(text))
            except YAMLError:
                continue  # a part of a document, or a form with gaps
            if slos(objects):
                yield (
                    f"{path.relative_to(folder)}{f' ({number + 1})' if path.suffix == '.md' else ''}",
                    objects,
                )


def slos(objects: list[Any]) -> int:
    """How many of them are to become agreements."""
    flat = (item for one in objects for item in (one if isinstance(one, list) else [one]))
    maps = (item for item in flat if isinstance(item, dict))
    return sum(item.get("kind") == "SLO" and item.get("apiVersion") == API_VERSION for item in maps)


def try_one(name: str, objects: list[Any]) -> Tried:
    """Import, fill in, accept; export what was accepted, and import that.

    Raises:
        AssertionError: something is lost, or is not said.
        AgreementsRefused: what was filled in is no agreement.
    """
    found = from_openslo(objects)
    assert len(found.documents) == slos(objects), f"{name}: {len(found.documents)} of {slos(objects)} SLOs"
    accepted = [_accepted(document, found) for document in found.documents]
    for agreement in accepted:
        exported = to_openslo(agreement).documents
        assert len(exported) == len(agreement.judged), f"{name}: {agreement.name}"
        again = from_openslo(json.loads(json.dumps(exported))).documents if exported else []
        for document, objective in zip(again, agreement.judged, strict=True):
            after = Agreement.model_validate(document)
            assert after.judged[0].demand_curve == objective.demand_curve
            assert after.judged[0].budgeting == objective.budgeting
            assert after.judged[0].indicator == objective.indicator
            assert (after.spec.scope, after.spec.window) == (agreement.spec.scope, agreement.spec.window)
    return Tried(name, accepted, found.unmapped)


def _accepted(document: dict[str, Any], found: Converted) -> Agreement:
    """As ``sla apply`` takes it; what a person had to fill in was said."""
    spec, name = document["spec"], document["metadata"]["name"]
    said = [line for line in found.unmapped if line.startswith(f"{name}: ")]
    objectives: list[dict[str, Any]] = spec["objectives"]
    for each in objectives:
        each["demand_curve"] = each["demand_curve"] or _filled("demand_curve", said)
        if each["budgeting"]["target"] is None:
            each["budgeting"]["target"] = _filled("target", said, 0.9)
    spec["scope"]["volumes"] = spec["scope"]["volumes"] or _filled("volumes", said)
    if spec["window"].get("period", "") is None:
        spec["window"]["period"] = _filled("period", said)
    (loaded,) = load_documents(json.dumps(document), 60)
    return loaded.agreement


def _filled(key: str, said: list[str], value: Any = None) -> Any:
    assert any(key in line and "left empty, fill it in" in line for line in said), (
        f"{key} is left empty, unsaid"
    )
    return FILLED[key] if value is None else value


def main() -> int:
    """See the module; the exit status."""
    failed, count = 0, 0
    for name, objects in examples(Path(sys.argv[1])):
        count += 1
        try:
            tried = try_one(name, objects)
        except (AssertionError, AgreementsRefused, ValueError, LookupError, TypeError) as exc:
            failed += 1
            print(f"{name}: FAILED: {type(exc).__name__}: {exc}")
            continue
        print(f"{name}: {', '.join(each.name for each in tried.agreements)}")
        print("".join(f"    not mapped: {line}\n" for line in tried.unmapped), end="")
    print(f"{count} texts with SLOs, {failed} failed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
