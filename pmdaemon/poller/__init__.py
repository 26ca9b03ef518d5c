"""The performance-monitor daemon: a parent process and its thread pairs (docs/design/1-monitor-daemon.md).

Process: ``parent`` listens, keeps the pairs alive (``children``, ``pair_manager``, ``balance``) and passes
sockets to them over ``channel``. A ``pair`` is a process of two threads: ``inbound`` alone selects on agents'
sockets (``connection``, ``transport``, ``admission``), ``outbound`` alone takes from the mailbox and sends.
Rules of one gateway need no socket: ``gateway``, ``registration``, ``frame_handlers``, ``schedule``,
``positions``, ``standing_caps``. ``publisher`` posts cuts and announcements to the other processes.
"""
