"""Migrations of the database schema (Alembic); run by ``sla_server.db.migrate``."""
