"""The cluster: many machines that appear as one server, on NATS JetStream (C, DESIGN.md 12).

Nothing of consensus, replication or failover is written here: nats-server does it. Here is what runs it: the
configuration of a node (``config``, ``server_conf``), parameters that must be the same everywhere
(``essentials``), the engine and what it can do (``engine``), the process that keeps it running (``process``,
``node``, ``launch``), membership (``membership``) and administration (``admin``). ``messages`` is the message
system on top, a library.

Only this package imports nats.

Design: docs/design/cluster.md, ADR 33; for operators: docs/operations/cluster.md.
"""
