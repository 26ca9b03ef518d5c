"""Ways out of the server: webhook, Alertmanager, mail, syslog, file, inbox, command, apprise, heartbeat (E5).

``base`` says what the engine expects of a recipient, ``build`` makes one from its document. Every step of a
recipient, name resolution included, ends at the deadline it is given. Secrets are read from files for each
delivery (``secret_files``) and are in no document, log line or error.
"""
