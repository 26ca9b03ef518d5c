"""``sla simulate``: the real control code against traces, generated loads or stored minutes.

``setup`` reads what to simulate (agreements, devices, loads), ``traces`` recorded I/O, ``stored`` turns what
the server itself kept into loads; ``loads`` and ``device`` are the two ends of the model around
``services.control.simulation``; ``run`` lets a mode run, ``figures`` judges it, ``report`` and ``page`` show
it.

Pure but for the reading of files; no threads. No part of a running server imports it.
"""
