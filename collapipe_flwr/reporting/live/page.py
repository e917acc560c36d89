"""The live page: the report's style and script, with what keeps them up to date.

It loads nothing from elsewhere.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from collapipe_flwr.reporting.report.script import SCRIPT
from collapipe_flwr.reporting.report.style import CSS

_SCRIPTS = ("numbers.js", "clusters.js", "figures.js", "live.js")


def page(nonce: str) -> str:
    """The page; its scripts run under a policy that names ``nonce``."""
    return _template().replace("<script>", f'<script nonce="{nonce}">')


@cache
def _template() -> str:
    text = _part("live.html")
    text = text.replace("<!-- style -->", f"<style>{CSS}{_part('live.css')}</style>")
    script = SCRIPT + "".join(map(_part, _SCRIPTS))
    return text.replace("<!-- script -->", f"<script>{script}</script>")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
