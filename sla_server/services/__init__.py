"""The services process: entity service, analyzer and policy manager (DESIGN.md 7).

Two layers. Pure: the control brain (``brain`` and what it uses, its decisions in ``decisions``). Around it
the
shell: ``core`` joins brain, agreements, slices and requests, ``looker`` reads SQL in a thread of its own,
``record_sender`` posts rows, ``process`` is the loop.
"""
