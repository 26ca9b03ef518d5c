"""Imports httpx and httpcore without what only their other users need.

httpx brings its own command (with a good part of rich, and pygments), httpcore the libraries of asynchronous
programs, where they are installed: anyio always is, as httpx asks for it. Together that is a third of the CPU
of an ``sla`` command, and some MB of each process. What imports httpx or httpcore imports this before; what
needs one of the hidden modules imports it afterwards as ever.
"""

from __future__ import annotations

import sys

_hidden = [name for name in ("anyio", "trio", "httpx._main") if name not in sys.modules]
for _name in _hidden:
    sys.modules[_name] = None  # type: ignore[assignment]  # to import it fails, as if it were not installed
try:
    import httpcore  # noqa: F401
    import httpx  # noqa: F401
finally:
    for _name in _hidden:
        del sys.modules[_name]
