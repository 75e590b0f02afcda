"""The engine behind OpenAI's interface.

requests.py   what clients may ask, checked
grammar.py    answers held to JSON or a schema
replies.py    what they are answered, whole or in pieces
app.py        routes, refusals, limits
limits.py     bodies, keys and origins, before any route
metrics.py    counters in Prometheus's text form
page.html     a chat page
command.py    `palimpsest serve`
"""

from palimpsest.server.app import Settings, create_app

__all__ = ["Settings", "create_app"]
