"""Names of folders, or of models and data sets on the Hugging Face hub.

A name that can only be a folder is never looked up. Before the first look-up the hub is tried once,
since the library alone would retry for a minute. If the hub does not answer, the process continues
offline: earlier downloads are used at once and everything else is refused.
"""

from __future__ import annotations

import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from logging import CRITICAL
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
_MOST_SLASHES = 1  # in owner/name


def expanded(name: str) -> Path:
    """The path of a name with ``~`` expanded; as it is written where there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def folder_only(name: str) -> bool:
    """Whether a name can only be that of a file or folder on this machine."""
    starts, path = name.startswith((".", "/", "~")), expanded(name)
    beside = "/" in name and path.parent.is_dir()
    return starts or beside or name.endswith("/") or "\\" in name or name.count("/") > _MOST_SLASHES


def no_such_path(key: str, name: str) -> str:
    """The message for a file or folder that does not exist."""
    looked = expanded(name).absolute()
    return f'{key} "{name}" does not exist (looked for {looked}): correct the path'


@cache
def is_reachable() -> bool:
    """Whether the hub answers within `LIMIT_S`; otherwise this process is offline from now on."""
    from huggingface_hub import constants

    answers = threading.Event()
    asking = threading.Thread(target=_ask, args=(constants.ENDPOINT, answers), daemon=True)
    if not constants.HF_HUB_OFFLINE:
        asking.start()  # a name server may take longer than any limit of a connection
        asking.join(LIMIT_S)
    if not answers.is_set():
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return answers.is_set()


def unreachable(name: str) -> str:
    """The message for a name that was not found because the hub does not answer; else empty."""
    if is_reachable():
        return ""
    return (
        f"there is no folder {name!r}, the hub cannot be reached from this machine, and nothing of "
        "that name was downloaded before"
    )


def was_downloaded(name: str, file: str) -> bool:
    """Whether the hub's cache on this machine has a file of a model."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, file), str)
    except ValueError:  # no name on the hub
        return False


@contextmanager
def quietly(logging: Any) -> Iterator[None]:
    """Keep a library, given its ``logging`` module, from logging what its errors say too."""
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
