"""The command lines: ``sla`` (``main`` and its commands) and ``sla-server`` (``server``).

``sla`` is a client of the REST API like any other: it opens no database and no mailbox, so it works through a
tunnel as well. ``client`` finds server and token and calls the API; ``get``, ``change``, ``policy`` and
``top`` hold the commands over it; ``formatting`` makes values and tables. ``ca``, ``storage`` and ``inspect``
work on the server's own files instead.
"""
