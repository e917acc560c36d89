"""The live page: one file, with its script and style inside, that loads nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_STYLES = ("live.css",)
_SCRIPTS = ("numbers.js", "clusters.js", "live.js")


def page(nonce: str) -> str:
    """The page; its scripts run under a policy that names ``nonce``."""
    return _template().replace("<script>", f'<script nonce="{nonce}">')


@cache
def _template() -> str:
    text = _part("live.html")
    text = text.replace("<!-- style -->", f"<style>\n{''.join(map(_part, _STYLES))}</style>")
    return text.replace("<!-- script -->", f"<script>\n{''.join(map(_part, _SCRIPTS))}</script>")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
