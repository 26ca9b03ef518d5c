"""Gateways as the pair knows them: who is registered, with what, and what their frames mean.

``registration`` checks what a gateway says of itself, ``gateway`` holds one gateway's state, ``registry``
all of a pair's, ``news`` words the announcements to the other processes, ``reception`` acts on each frame
that arrives. No sockets, selectors or threads here; connections are given.
"""
