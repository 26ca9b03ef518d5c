"""The storage resource manager (P17): space of pools and volumes, forecasts, alerts, actions by policy.

config.py       ``[storage]``: the server's own sources, marks, commands
watermarks.py   levels with hysteresis; pure
forecast.py     when a pool will be full, with an interval; pure numpy
pools.py        what is known of each pool; readings in, rows and events out; pure
"""
