"""The process ``sla-server relay``: one recipient for a server, many at another site (E8).

A server's webhook recipient posts to it (``events.receiver``); from there on it is the engine of event
delivery with its queues, lanes, routes and recipients (``events.delivery``). Only what a relay has instead
of SQL is here: its configuration and documents (``config``, ``documents``), the memory of identities
(``records``), the final confirmation (``final``), and the process (``process``).

Design: docs/design/8-event-delivery.md, ADR 27; for operators: docs/operations/relay.md.
"""
