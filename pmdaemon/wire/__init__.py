"""The wire protocol between agents and the PMDaemon, and the form of messages between our processes.

Sans-IO: this package imports no socket, selector, thread or clock. ``frame`` turns bytes into frames and
back, ``cut`` holds the statistics columns, ``histogram`` the bucket layout, ``kinds`` the frame types,
``session`` the transition table of a session, ``names`` the identities. Byte diagrams: docs/formats/wire.md.
"""
