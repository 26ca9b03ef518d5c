"""Why a volume is throttled, or a promise at risk, now or then: stored rows in, plain words out.

``explain`` is the one function; the API gathers its facts (``sla_server.api.handlers.why``), and command line
and page show the same words. A library: no I/O, no clock, no SQL; imports no program.
"""

from __future__ import annotations

from sla_server.explanation.explain import Explanation, Section, explain
from sla_server.explanation.words import Times

__all__ = ["Explanation", "Section", "Times", "explain"]
