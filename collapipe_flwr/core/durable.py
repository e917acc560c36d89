"""Files and folders that are whole or absent, whatever stops the process or the machine.

What is new is written into a folder of its own beside its place, flushed to disk, and moved to its
place in one step; then the folder that lists it is flushed too. Only after that may a caller delete
what it replaces. A killed writer leaves behind its own folder, whose name ends with ``.partial``.

Writers share a lock on the folder that they write in, and what is left over is removed under an
exclusive one: by the next writer of the same file, and by `clean`. On a file system without locks
nothing is removed. All functions raise OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import BinaryIO

from safetensors import SafetensorError

from collapipe_flwr.core.errors import ConfigError

_PARTIAL = ".partial"
_BLOCK_BYTES = 1 << 16


def write_file(path: Path, save: Callable[[Path], object]) -> None:
    """Replace a file with what ``save`` writes where it is told to."""
    with draft(path) as written:
        save(written)
        publish(written, path)


def write_text(path: Path, text: str) -> None:
    """Replace a text file."""
    write_file(path, lambda written: written.write_text(text, encoding="utf-8"))


def write_private(path: Path, data: bytes) -> None:
    """Replace a file that only its owner can read, at any time."""

    def save(written: Path) -> None:
        written.touch(0o600)
        written.write_bytes(data)

    write_file(path, save)


def append_text(path: Path, text: str) -> None:
    """Add lines to a file; a reader may find a part of ``text`` after a power cut.

    What such a cut left of a last line goes first, so that nothing is glued to it.
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
    """Where to write what `publish` then moves to ``path``; what was not moved is removed."""
    clean(path.parent, of=path.name)
    with _lock(path.parent, fcntl.LOCK_SH):
        folder = mkdtemp(prefix=f"{path.name}.", suffix=_PARTIAL, dir=path.parent)
        try:
            yield Path(folder) / path.name
        except SafetensorError as error:  # which is what it makes of a full disk
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
    """Make a folder, and those above it, unless it is there; ``mode`` is for itself only."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def own_folder(path: Path, option: str) -> Path:
    """Make a folder that only its owner may enter, and `clean` it; the folder.

    Raises ConfigError, which names the ``option``, where OSError is raised elsewhere.
    """
    try:
        make_folder(path, 0o700)
        clean(path)
    except OSError as error:
        raise ConfigError(f'{option} "{path}" cannot be made: {error.strerror}') from error
    return path


def sync(path: Path) -> None:
    """Bring to disk the bytes of a file, or the names that a folder lists."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some file systems: no such thing
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file, if it is there, so that it does not come back after a power cut."""
    if path.exists():
        path.unlink(missing_ok=True)
        sync(path.parent)


def clean(folder: Path, *, of: str = "") -> None:
    """Remove what killed writers left in a folder: of one file, or of all where it is ours.

    Does nothing while another thread or process writes there.
    """
    with _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
        names = os.listdir(folder) if alone else ()
        for name in names:
            if name.startswith(f"{of}." if of else "") and name.endswith(_PARTIAL):
                left = folder / name
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def _lock(folder: Path, kind: int) -> Iterator[bool]:
    """Whether the lock was to be had; the end of the process releases it as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    locked = False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, kind)
            locked = True
        yield locked
    finally:
        os.close(descriptor)
