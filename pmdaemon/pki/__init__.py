"""The private certificate authority: keys, certificates, one-time tokens, revocation, TLS contexts.

``authority`` is what the server and ``sla ca`` use, ``store`` the files below it, ``certificates`` the pure
part over the library ``cryptography`` (imported by this package alone) with what a certificate says of its
holder, ``tokens`` enrolment, ``contexts`` the two kinds of TLS context. No sockets and no threads.
"""
