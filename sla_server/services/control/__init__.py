"""The control loop: from cuts to throttles (SLA-MODEL.md 3). Pure but for the time it is given; one thread.

``controller`` is the entry; ``signal`` says which promises are at risk, ``backend_loop`` how much all
throttled volumes of a backend may use together, ``sharing`` who gets how much, ``policy_manager`` issues.
``simulation`` is the small world that tests and ``make bench-control`` run the controller in.
"""
