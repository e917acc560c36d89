"""Find the model of `collapipe generate` without importing the libraries that load it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.hub import expand_home, explain_absent_model, is_folder_only

_CONFIG = "config.json"
_WRITES_NO_TEXT = re.compile(r".*For(\w*Classification|MaskedLM|QuestionAnswering|MultipleChoice)")


def find_model(name: str) -> str:
    """Return what transformers loads: the folder of a run's model, another folder, or a hub name.

    Raises ModelError where there is no model, or none that writes texts.
    """
    folder = expand_home(name)
    if (folder / "model").is_dir():
        folder = folder / "model"
    elif folder.is_dir() and (runs := sorted(run.parent for run in folder.glob("*/model"))):
        raise ModelError(f"--run {name!r} is a folder of runs: name one, such as {runs[-1]}")
    if folder.is_dir():
        _check_folder(name, folder)
        return str(folder)
    if is_folder_only(name) or folder.exists():
        raise ModelError(
            f"--run {name!r}: there is no such folder (looked for {folder.absolute()}): "
            "correct the path"
        )
    if why := explain_absent_model(name):
        raise ModelError(f"--run {name!r}: {why}; correct the path")
    return name


def _check_folder(name: str, folder: Path) -> None:
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        classes = config.get("architectures") or ()
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"--run {name!r} holds no model: {folder / _CONFIG} is missing or damaged; name a run "
            "that ended, or a folder that transformers loads"
        ) from error
    for kind in classes:
        if _WRITES_NO_TEXT.fullmatch(str(kind)):
            raise ModelError(
                f"--run {name!r} holds a {kind}, which writes no text: name a model that "
                "continues, translates or summarises texts; load this one by transformers"
            )
