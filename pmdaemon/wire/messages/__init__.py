"""Every message of the product as a frozen dataclass: a file or more for each conversation.

    agent         an agent and the PMDaemon, on the gateway's connection; parts of the same conversation are
    alerts        what an agent reports unasked,
    certificates  enrolment and renewal,
    costs         what an I/O costs,
    space         how full pools of storage are, and
    ends          frames not understood, errors and goodbyes (planes use them, too)
    server        the server's processes, in the main mailbox segment; what services orders there is in
    orders        caps, thresholds, costs, and that services is alive
    stored        what dbmanager reads again from its queue, of any release
    api           the application server and services
    planes        the agent's link and its data planes, on a Unix socket; the entries of
    plane_sets    caps and thresholds, as a plane puts them in force, and
    plane_report  what a plane says of itself for people
    mirror        the event deliveries of two cooperating servers

``parse`` takes the header of a received frame, checks types, ranges and lengths, and raises a ``WireError``
that names message, key and value. ``encode`` gives the frame. The fields of a class, in their order, are the
keys on the wire; docs/formats/messages.md is generated from them and from the docstrings (``make docs``).

Four kinds are sent or read so often that their bytes have a code path of their own, which never makes the
dataclass: POLL and REPLY (``wire.frame_template``), CUT (``wire.cut``) and CUTS
(``poller.cut_batch``). The dataclass documents them and is used where nothing is measured.
"""
