"""The application server (DESIGN.md 11): REST under /api/v1, live stream, sessions, the page's host process.

    config          settings                            routes      the table of routes
    errors          refusals as problem+json            openapi     the table as an OpenAPI document
    context         what the handlers work with         responses   JSON, ETag, cursors, parameters
    live_view       newest snapshot, trend, streams     handlers/   read, write, live, documents, why
    operations      requests to services                security    token, sessions, Host and Origin
    mailbox_thread  takes snapshots and responses       metrics     Prometheus text of all parts
    live_metrics    those of agreements, volumes ...    server      process, sockets, waitress
    app             the Flask app made of all this

Nothing is imported here: the configuration of every part passes through ``api.config``, and must not load
Flask.
"""
