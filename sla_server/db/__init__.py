"""The database manager and the only door to SQL.

Reading: ``queries.reader.open_reader``. Policy jobs: ``policies``. Writing: the dbmanager process
(``process.run``) alone; every other process sends it RECORD messages. Design: docs/design/5-database.md;
tables: docs/formats/sql.md.
"""
