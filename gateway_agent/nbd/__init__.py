"""The NBD data plane: counts and throttles the I/O of its volumes (docs/design/gateway.md)."""
