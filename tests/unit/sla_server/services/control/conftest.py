from __future__ import annotations

import pytest

from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.settings import ControlSettings


@pytest.fixture
def control() -> BackendControl:
    """The loop of one backend, idle."""
    return BackendControl(ControlSettings(), "disk")
