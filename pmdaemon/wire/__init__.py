"""The wire protocol between agents and the PMDaemon, and the form of messages between our processes.

Sans-IO: this package imports no socket, selector, thread or clock. ``frame`` turns bytes into frames and
back, ``messages`` holds their headers as dataclasses, ``cut`` the statistics columns, ``histogram`` the
bucket layout, ``frame_template`` the fast forms of POLL and its answer, ``kinds`` the frame types,
``session`` the transition table of a session, ``rates`` caps and GCRA, ``names`` the identities, ``sni`` the
server name of a TLS connection. Byte diagrams: docs/formats/wire.md.
"""
