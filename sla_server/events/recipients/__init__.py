"""The ways out of the server: one file for each kind of recipient. ``base`` has what they share."""
