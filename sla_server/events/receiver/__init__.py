"""Events from another server: its webhook recipient posts them, and they enter the queue of events here.

``posts`` checks and reads a body, ``listener`` has the sockets. A relay receives this way
(``sla_server.relay``).
"""
