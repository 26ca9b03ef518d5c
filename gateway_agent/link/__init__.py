"""The link process: session to the PMDaemon, spool, collection, caps and thresholds for the data planes.

``core`` decides and is pure (bytes and times in, bytes out), with ``collection``, ``reply``
and ``caps``; ``spool`` and ``state_files`` touch files; ``connection`` and ``loop`` alone touch sockets;
``main`` is the process.
"""
