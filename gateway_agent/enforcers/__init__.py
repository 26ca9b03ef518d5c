"""Enforcers of caps, one file each; ``base`` has the protocol."""
