"""The command lines: ``sla`` (``main`` and its commands) and ``sla-server`` (``server``).

``sla`` is a client of the REST API like any other: it opens no database and no mailbox, so it works through a
tunnel as well. ``client`` finds server and token and tells errors; ``get``, ``change``, ``policy`` and
``top`` hold the commands; ``tables`` says what each table shows.
"""
