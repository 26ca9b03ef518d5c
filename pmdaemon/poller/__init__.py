"""The performance-monitor daemon: a parent process and its thread pairs (docs/design/1-monitor-daemon.md).

Processes: ``parent`` listens, dials (``dialler``), keeps pairs alive (``children``) and decides which of
them has which shard (``balance``); it passes new connections on over ``channel``. A ``pair`` is a process
of two threads: ``inbound`` alone selects on agents' sockets (``connection``, ``admission``, ``timeouts``)
and posts, ``outbound`` alone takes from the mailbox and sends; ``unified`` lets one thread do both.
``certificates`` is a third thread; ``migration`` is the pair's side of shards that move.

Rules of one gateway need no socket: ``gateway``, ``frame_handlers`` and its
``fast_path``, ``schedule``, ``positions``, ``catch_up``, ``quotas``, ``standing_caps``, ``clock_offset``.
``publisher`` posts cuts (``cut_batch``) and announcements to the other processes; ``metrics`` says how the
daemon is doing.
"""
