"""The gateway agent: what runs on a storage host, in the I/O path (``nbd``) or beside it (``host``).

``agent`` is the small parent process, ``link`` the process that talks to the SLA server, ``nbd`` the data
planes.
"""
