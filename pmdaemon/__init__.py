"""The performance-monitor daemon and the low layers that every other part of the product stands on.

Invariant: nothing in this package imports ``sla_server``, ``gateway_agent`` or ``dashboard``.
"""
