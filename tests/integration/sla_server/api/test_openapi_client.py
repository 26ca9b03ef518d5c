"""A generator that is not ours makes a client of the OpenAPI document, and the client works with a server."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from sla_server.api import openapi
from sla_server.api.route import PREFIX
from sla_server.api.routes import ROUTES
from tests.support import api
from tests.support.site import Site

PACKAGE = "sla_client_generated"
CONFIG = f"""\
package_name_override: {PACKAGE}
post_hooks: []
content_type_overrides:
  application/yaml: application/octet-stream  # a text, as it is
"""


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The client's package, importable; the generator may leave nothing out."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "openapi.json").write_text(json.dumps(openapi.document()))
    (folder / "config.yaml").write_text(CONFIG)
    command = [str(Path(sys.executable).with_name("openapi-python-client")), "generate", "--fail-on-warning"]
    command += ["--path", "openapi.json", "--config", "config.yaml"]
    command += ["--meta", "none", "--output-path", PACKAGE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield folder / PACKAGE
    sys.path.remove(str(folder))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(api.data_dir(tmp_path))
    yield made
    made.close()
    made.mailbox.close()


def module(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


def test_each_operation_has_a_function(generated: Path) -> None:
    made = {path.stem for path in (generated / "api" / "default").glob("*.py")}
    assert {route.operation for route in ROUTES} <= made
    assert len(ROUTES) > 90


def test_it_reads_and_changes_what_a_server_has(generated: Path, site: Site) -> None:
    assert generated.is_dir()
    token = site.server.context.token
    made = module("client").AuthenticatedClient(base_url=site.url.removesuffix("/"), token=token)
    with made as client:
        agreements = module("api.default.slas").sync(client=client)
        assert [row.name for row in agreements.items] == ["erp-gold"]
        issued = module("api.default.report").sync("erp-gold-2026-12", client=client)
        assert type(issued).__name__ == "IssuedReport"
        assert len(issued.digest) == 64
        problem = module("api.default.sla").sync("none", client=client)
        assert (problem.status, type(problem).__name__) == (404, "Problem")
        site.mailbox.answer = lambda header: (True, 200, {"applied": [], "warnings": []})
        body = module("types").File(payload=BytesIO(b"kind: SLA"))
        answer = module("api.default.apply_slas").sync_detailed(client=client, body=body)
        assert answer.status_code == 200
    (asked,) = site.mailbox.posted
    assert asked["op"] == "apply"
    assert asked["body"]["documents"] == "kind: SLA"


def test_the_document_is_the_one_that_the_server_answers(site: Site) -> None:
    answer = httpx.get(f"{site.url}{PREFIX[1:]}/openapi.json", timeout=60)
    assert answer.json() == json.loads(json.dumps(openapi.document()))
