"""Handlers of the REST API: ``read`` (SQL and live view), ``write`` (requests to services), ``live``."""
