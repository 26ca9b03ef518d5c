"""The services process: entity service, analyzer and policy manager (DESIGN.md 7).

Two layers. Pure: ``control.controller`` and what it uses, with its decisions in ``control.decisions``, and
``judging``. Around them the shell: ``core`` joins controller, agreements, slices and requests, ``sql_worker``
reads SQL in a thread of its own, ``record_sender`` posts rows, ``process`` is the loop.
"""
