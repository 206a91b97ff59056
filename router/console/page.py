"""The page as one document: markup, style and script of the folder `page`, which run under a policy that allows these
two alone. Nothing is fetched but this router's own state and answers.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.responses import Response


def page() -> Response:
    document, policy = _document()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(document, media_type="text/html", headers=headers)


@cache
def _document() -> tuple[str, str]:
    """And its content security policy."""
    folder = files("router.console") / "page"
    style, script, markup = (
        (folder / name).read_text("utf-8") for name in ("console.css", "console.js", "console.html")
    )
    document = markup.replace("/* console.css */", style).replace("/* console.js */", script)
    policy = (
        "default-src 'none'",
        f"script-src {_source(script)}",
        f"style-src {_source(style)}",
        "connect-src 'self'",
        "img-src data:",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return document, "; ".join(policy)


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
