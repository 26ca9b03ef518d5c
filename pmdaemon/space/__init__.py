"""Space of storage: how full pools are, read on agents and on the server. A library.

config.py    what a source is (``[[space.source]]``)
readers.py   one function a kind of source: commands in, a ``Space`` out; pure but for what runs the commands
watcher.py   the thread that goes through the sources, and says once what failed
"""
