"""The cycle poll -> record -> control, as far as it needs no socket (P3).

``schedule`` says when each gateway is polled, ``record`` which cuts were received and may be acknowledged,
``offset`` how far an agent's clock is off, ``control`` which caps and thresholds are in force, ``batch`` and
``courier`` how cuts and news travel on to the other processes. Nothing here imports a socket, a selector or
a thread; time is an argument.
"""
