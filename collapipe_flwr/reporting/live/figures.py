"""The report of a run that goes on, in pieces: the sections of its page, with their charts.

The page fetches it anew when rounds have ended. It is made when somebody asks and there is news,
however many ask.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.live.reader import News
from collapipe_flwr.reporting.report.charts import Section
from collapipe_flwr.reporting.report.overview import tiles
from collapipe_flwr.reporting.report.page import require_report, run_sections, section_html
from collapipe_flwr.reporting.report.run_data import RunData


class Figures:
    """Folds rounds, and makes the report's sections of them."""

    def __init__(self) -> None:
        self._data = RunData("")
        self._lock = threading.Lock()
        self._changed = True
        self._text = "{}"

    def take(self, news: News) -> None:
        """Rounds that ended, and what the summary says by now."""
        with self._lock:
            if news.anew:
                self._data = RunData(news.head["name"])
            if news.anew or news.events or news.summary is not self._data.summary:
                self._data.summary, self._data.config = news.summary, news.head["config"]
                for event in news.events:
                    self._data.add(event)
                self._changed = True

    def text(self) -> str:
        """Tiles and sections as JSON, or why there are none."""
        with self._lock:
            if self._changed:
                self._text = json.dumps(self._made(), separators=(",", ":"), allow_nan=False)
                self._changed = False
            return self._text

    def _made(self) -> dict[str, Any]:
        if not self._data.rounds:
            return {"sections": []}
        try:
            require_report()
            sections = [_section(section) for section in run_sections(self._data)]
        except ConfigError as error:
            return {"sections": [], "missing": str(error)}
        found = [[t.title, t.value, t.note, t.warning] for t in tiles(self._data)]
        return {"sections": sections, "tiles": found}


def _section(section: Section) -> dict[str, Any]:
    return {
        "key": section.key,
        "title": section.title,
        "html": section_html(section),
        "charts": section.figures,
    }
