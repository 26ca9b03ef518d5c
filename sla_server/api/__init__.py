"""The application server (DESIGN.md 11): REST under /api/v1, live stream, sessions, the page's host process.

    config      what can be set                     routes    one table: path, rights, parameters, answers
    errors      every refusal as problem+json       openapi   the table as an OpenAPI document
    live        newest snapshot, trend, streams     answers   JSON, ETag, cursors, parameters
    calls       requests to services, operations    lists     handlers that read
    bridge      the mailbox thread                  changes   handlers that change
    source      what is read from SQL               watching  handlers of the live view and the self-metrics
    security    token, sessions, Host and Origin    app       Flask app out of all this
    reading     what the dashboard may call         process   waitress, sockets, files, start and stop

Nothing is imported here: the configuration of every part passes through ``api.config``, and must not load
Flask.
"""
