"""The performance-monitor daemon and the low layers that every other part of the product is built on.

Invariant: nothing in this package imports ``sla_server``, ``gateway_agent`` or ``dashboard``.
"""
