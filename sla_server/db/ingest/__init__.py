"""Ingest: from mailbox messages through the disk queue into SQL, exactly once (docs/design/5-database.md)."""
