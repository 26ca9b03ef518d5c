"""The page: a shell served by Flask, filled by a script that uses the REST API like any other client.

``create_app`` makes the application that the process serves: the API with the page added. The page reads and
changes through ``/api/v1`` only; in process it uses ``create_app`` and ``AppContext`` of ``sla_server.api``
and nothing else of the server.
"""

from dashboard.page import create_app

__all__ = ["create_app"]
