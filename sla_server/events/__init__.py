"""Events: their form, their catalogue, and the process ``delivery`` that brings them to people.

``event`` has the form and its codec, ``catalogue`` what kinds there are. ``delivery`` is the process: it
takes events from the reserves of all processes (``pmdaemon.reserve``) into a disk queue (``intake``) and from
there to the recipients (``engine``, ``stages``, ``recipients``).

Design: docs/design/8-event-delivery.md; kinds: docs/formats/events.md.
"""
