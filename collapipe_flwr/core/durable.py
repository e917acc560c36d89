"""Atomic files and folders, complete or absent after any crash of the process or the machine.

A new file is written in a temporary folder beside its path, flushed to disk, and renamed to its
path; then the parent folder is flushed too. Only after that may a caller delete what it replaces.
A killed writer leaves its temporary folder, whose name nothing but this module makes
(``NAME.xxxxxxxx.collapipe.partial``): other files and folders are never deleted.

Writers share a lock on the parent folder, and leftovers are removed under an exclusive lock: by the
next writer of the same file, and by `clean`. On a file system without locks nothing is removed. All
functions raise OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import BinaryIO

from safetensors import SafetensorError

from collapipe_flwr.core.errors import ConfigError

_PARTIAL = ".collapipe.partial"
_DRAFT = re.compile(rf"(?P<of>.+)\.[a-z0-9_]{{8}}{re.escape(_PARTIAL)}", re.DOTALL)  # of `mkdtemp`
_BLOCK_BYTES = 1 << 16


def write_file(path: Path, save: Callable[[Path], object]) -> None:
    """Replace a file by the one that ``save`` writes to the path that it is passed."""
    with draft(path) as written:
        save(written)
        publish(written, path)


def write_text(path: Path, text: str) -> None:
    write_file(path, lambda written: written.write_text(text, encoding="utf-8"))


def write_private(path: Path, data: bytes) -> None:
    """Replace a file; the new one is readable by its owner only, from the start."""
    with draft(path) as written:
        written.touch(0o600)
        written.write_bytes(data)
        publish(written, path)


def append_text(path: Path, text: str) -> None:
    """Append lines to a file; a power cut may leave a part of them.

    An incomplete last line of an earlier power cut is removed first.
    """
    is_new = not path.exists()
    with path.open("ab+") as file:
        _drop_torn_line(file)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def _drop_torn_line(file: BinaryIO) -> None:
    end = place = file.seek(0, os.SEEK_END)
    found = b""
    while place and b"\n" not in found:
        step = min(place, _BLOCK_BYTES)
        place = file.seek(place - step)
        found = file.read(step)
    whole = place + found.rfind(b"\n") + 1
    if whole < end:
        file.truncate(whole)


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Yield a path to write to; `publish` moves the file to ``path``, otherwise it is removed."""
    clean(path.parent, of=path.name)
    with _lock(path.parent, fcntl.LOCK_SH):
        folder = mkdtemp(prefix=f"{path.name}.", suffix=_PARTIAL, dir=path.parent)
        try:
            yield Path(folder) / path.name
        except SafetensorError as error:  # also of a full disk
            raise OSError(str(error)) from error
        finally:
            shutil.rmtree(folder)


def publish(written: Path, path: Path) -> None:
    """Move a draft to its place once all of it is on disk; a folder must not replace another."""
    for folder, _, files in os.walk(written, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if written.is_file():
        sync(written)
    written.replace(path)
    sync(path.parent)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents unless they exist; ``mode`` is for the folder itself."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def make_numbered_folder(path: Path) -> Path:
    """Make a new folder, with a number behind its name if the name is taken."""
    make_folder(path.parent)
    number, free = 1, path
    while True:
        try:
            free.mkdir()
        except FileExistsError:
            number += 1
            free = path.with_name(f"{path.name}-{number}")
        else:
            sync(path.parent)
            return free


def make_own_folder(path: Path, option: str) -> Path:
    """Make a folder that only its owner may enter, and `clean` it; returns the folder.

    Raises ConfigError, which names the ``option``, instead of OSError.
    """
    try:
        make_folder(path, 0o700)
        clean(path)
    except OSError as error:
        raise ConfigError(f'{option} "{path}" cannot be made: {error.strerror}') from error
    return path


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # not supported by some systems
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, if it exists, so that it does not come back after a power cut."""
    if path.exists():
        path.unlink(missing_ok=True)
        sync(path.parent)


def clean(folder: Path, *, of: str = "") -> None:
    """Remove the leftovers of killed writers in a folder, of one file or of all.

    Does nothing while another thread or process writes there.
    """
    with _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
        for left in os.scandir(folder) if alone else ():
            known = _DRAFT.fullmatch(left.name)
            if known and known["of"] == (of or known["of"]) and left.is_dir(follow_symlinks=False):
                shutil.rmtree(left)


@contextmanager
def _lock(folder: Path, kind: int) -> Iterator[bool]:
    """Lock a folder, and yield whether that worked; the end of the process unlocks it too."""
    descriptor = os.open(folder, os.O_RDONLY)
    locked = False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, kind)
            locked = True
        yield locked
    finally:
        os.close(descriptor)
