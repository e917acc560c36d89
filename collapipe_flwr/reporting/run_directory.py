"""The folder a run leaves behind: ``summary.json``, ``events.jsonl`` and the trained model.

``events.jsonl`` gets one line per round as soon as the round ends. ``summary.json`` is replaced
as a whole (temporary file, then rename), so a reader never sees half of it, and its ``status``
says ``running``, ``completed`` or ``failed``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError

Json = Mapping[str, object]


class RunDirectory:
    """Owns one new folder; every write is complete or absent."""

    def __init__(self, path: Path) -> None:
        """Create the folder; raises ConfigError when it exists or cannot be made."""
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            raise ConfigError(f'output-dir: "{path}" exists already; choose another') from error
        except OSError as error:
            raise ConfigError(f'output-dir: "{path}" cannot be made ({error.strerror})') from error
        self.path = path

    @property
    def model_path(self) -> Path:
        """Where the trained model goes, in the form that transformers loads."""
        return self.path / "model"

    def append_event(self, event: Json) -> None:
        """Add one line to ``events.jsonl``."""
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")

    def write_summary(self, summary: Json) -> None:
        """Replace ``summary.json``."""
        temporary = self.path / "summary.json.partial"
        text = json.dumps(summary, indent=2, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path / "summary.json")


def read_summary(run_dir: Path) -> dict[str, object] | None:
    """The summary of a run directory, or None where there is none yet."""
    path = run_dir / "summary.json"
    if not path.exists():
        return None
    summary: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def read_events(run_dir: Path) -> list[dict[str, object]]:
    """The rounds of a run directory so far, oldest first."""
    path = run_dir / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
