"""Names of folders, or of models and data sets on the Hugging Face hub.

A name that can only be a folder is never looked up. Before the first look-up the hub is tried once,
since the library alone would retry for a minute. A slow answer is announced. If the hub does not
answer, the process continues offline: earlier downloads are used at once and everything else is
refused.
"""

from __future__ import annotations

import logging as logs
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from logging import CRITICAL
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
SILENT_S = 1.0  # of it, before the wait is announced
_NAME = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")  # as the hub allows them
CONFIG = "config.json"  # of a checkpoint
_log = logs.getLogger(__name__)


def expand_home(name: str) -> Path:
    """Return the path of a name with ``~`` expanded, or as written if there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_folder_only(name: str) -> bool:
    """Return whether a name can only be that of a file or folder on this machine.

    Configuration and split of a data set may follow its name.
    """
    beside = "/" in name and expand_home(name).parent.is_dir()
    return beside or _NAME.fullmatch(name.partition(":")[0]) is None


def explain_no_path(key: str, name: str) -> str:
    """Explain that a file or folder does not exist, or that a file is no folder."""
    looked = expand_home(name).absolute()
    if looked.exists():
        return f'{key} "{name}" is no folder: name one'
    return f'{key} "{name}" does not exist (looked for {looked}): correct the path'


def explain_no_checkpoint(key: str, name: str) -> str:
    """Explain that a folder holds no checkpoint; return "" if it does, or the hub may know it."""
    folder = expand_home(name)
    if folder.is_file() and folder.suffix == ".gguf":
        return (
            f'{key} "{name}" is a GGUF file: name the folder that `collapipe convert` makes of it'
        )
    if folder.is_file():
        return f'{key} "{name}" is a file: name its folder'
    if not folder.is_dir():
        return explain_no_path(key, name) if is_folder_only(name) else ""
    if (folder / CONFIG).exists():
        return ""
    return (
        f'{key} "{name}" has no {CONFIG}: give a folder with {CONFIG}, as transformers saves it, '
        "or a hub name"
    )


@cache
def is_reachable() -> bool:
    """Return whether the hub answers within `LIMIT_S`; otherwise this process goes offline."""
    from huggingface_hub import constants

    answers = threading.Event()
    asking = threading.Thread(target=_ask, args=(constants.ENDPOINT, answers), daemon=True)
    if not constants.HF_HUB_OFFLINE:
        asking.start()  # a name server may take longer than any limit of a connection
        asking.join(min(SILENT_S, LIMIT_S))
        if asking.is_alive():
            _log.warning("waiting for %s for up to %g s", constants.ENDPOINT, LIMIT_S)
            asking.join(LIMIT_S - SILENT_S)
    if not answers.is_set():
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return answers.is_set()


def explain_unreachable(name: str) -> str:
    """Explain that a name was not found as the hub does not answer; return "" if it does."""
    if is_reachable():
        return ""
    near = get_close_matches(name, (path.name for path in Path().iterdir() if path.is_dir()), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"there is no folder {name!r}{hint}, the hub cannot be reached from this machine, and "
        "nothing of that name was downloaded before"
    )


def explain_absent_model(name: str) -> str:
    """Explain that a model is no folder and the hub does not answer; return "" otherwise.

    The hub may still not know the name.
    """
    if expand_home(name).is_dir() or not (why := explain_unreachable(name)):
        return ""
    from huggingface_hub import try_to_load_from_cache

    return "" if isinstance(try_to_load_from_cache(name, CONFIG), str) else why


@contextmanager
def silence(logging: Any) -> Iterator[None]:
    """Silence a library's ``logging`` module in the body, as its errors say the same."""
    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _ask(endpoint: str, answers: threading.Event) -> None:
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=LIMIT_S).close()
    except urllib.error.HTTPError:
        answers.set()
    except OSError:
        return
    answers.set()
