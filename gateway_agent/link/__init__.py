"""The link process: session to the PMDaemon, spool, collection, hand-over of caps and thresholds.

``session``, ``commands``, ``merge``, ``collect``, ``caps`` and ``core`` are pure (bytes and times in, bytes
out); ``spool``, ``state`` and ``streams`` touch files; ``shell`` alone touches sockets; ``main`` is the
process.
"""
