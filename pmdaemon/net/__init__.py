"""Sockets, selectors and the threads of the pair: the thin shell around ``wire``, ``cycle`` and ``gateways``.

``inbound`` and ``outbound`` are the two threads of a pair (P10), ``connection`` one agent's socket, ``pair``
the process around them; ``listener``, ``handoff`` and ``children`` belong to the parent. The only package of
the daemon that imports ``socket`` and ``selectors``.
"""
