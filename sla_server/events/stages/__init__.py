"""The stages of distribution (E4): what becomes of one event for one recipient, each in a file of its own.

Order: route, silence, inhibit, deduplicate, group, send, confirm. A stage is a pure function of the event,
the recipient and what the lane knows; it passes an event on (None) or decides, with a reason for people. The
preview of a route calls the same functions.
"""
