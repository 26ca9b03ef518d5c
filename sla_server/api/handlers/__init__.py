"""Handlers of the REST API: ``read`` (SQL, live view), ``documents``, ``write`` (asks services), ``live``."""
