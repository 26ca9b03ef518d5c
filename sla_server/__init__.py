"""The SLA server: supervisor, services, database manager, application server and policy jobs."""
