"""The live view of the fleet, and a playground: a page at /console, and the JSON behind it that `headrace top` shows.

state.py        what is shown, as plain data
observer.py     makes it, once a second, from what the router knows
routes.py       /console, /console/state, /console/events, /console/generate
streaming.py    server-sent events, and errors before and within them
playground.py   a prompt as JSON, its answer and where it went as events
page.py         the page: one document, made of the files in page/
"""

from router.console.observer import Observer
from router.console.routes import routes

__all__ = ["Observer", "routes"]
