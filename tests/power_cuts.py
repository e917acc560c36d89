"""A disk that forgets: what a machine may find after a power cut at any moment of some work.

A file's bytes are on disk after `fsync` of the file, its name after `fsync` of the folder that
lists it, and nothing is promised before. `watched` stops at every `fsync`, rename, deletion and
new folder; for a cut before and after each it notes what could be found: names as they were when
their folder was flushed or as they are, and bytes as they were when their file was flushed, or a
part of what came later.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

Tree = Mapping[str, bytes | None]  # by path below the root; None: a folder
CALLS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """The process ends here."""


@dataclass(eq=False)
class _Thing:
    """A file or folder, whatever its names."""

    flushed: bytes = b""
    listed: dict[str, _Thing] | None = None  # when it was flushed; None: a file
    now: bytes = b""
    lists: dict[str, _Thing] = field(default_factory=dict)  # now


def _torn(thing: _Thing) -> bytes:
    """Half of what came after the last flush."""
    return thing.now[: (_kept(thing) + len(thing.now)) // 2]


def _holed(thing: _Thing) -> bytes:
    """As long as it is, with zeros where half of what came after the last flush should be."""
    kept, half = _kept(thing), len(_torn(thing))
    return thing.now[:kept] + bytes(half - kept) + thing.now[half:]


def _kept(thing: _Thing) -> int:
    return len(thing.flushed) if thing.now.startswith(thing.flushed) else 0


BYTES: tuple[Callable[[_Thing], bytes], ...] = (
    lambda thing: thing.flushed,
    _torn,
    _holed,
    lambda thing: thing.now,
)


def _names_flushed(thing: _Thing, _listed: bool) -> Mapping[str, _Thing]:
    return thing.listed or {}


def _names_now(thing: _Thing, _listed: bool) -> Mapping[str, _Thing]:
    return thing.lists


def _names_outside(thing: _Thing, listed: bool) -> Mapping[str, _Thing]:
    """A folder has a new name at once, but what it lists came too late."""
    return thing.lists if listed else thing.listed or {}


NAMES: tuple[Callable[[_Thing, bool], Mapping[str, _Thing]], ...] = (
    _names_flushed,
    _names_now,
    _names_outside,
)


@dataclass
class Disk:
    """What lies below ``root``. ``found``: what a cut may leave, with what was ``done`` by then."""

    root: Path
    done: int = 0
    found: list[tuple[int, Tree]] = field(default_factory=list)
    _things: dict[int, _Thing] = field(default_factory=dict)  # by inode, while it has one

    def look(self) -> None:
        """A cut now."""
        top = self._read(self.root)
        for names, content in product(NAMES, BYTES):
            tree: dict[str, bytes | None] = {}
            _fill(tree, "", top, True, names, content)
            if (self.done, tree) not in self.found:
                self.found.append((self.done, tree))

    def flush(self, path: Path) -> None:
        """A file's bytes, or what a folder lists, are on disk from now on."""
        thing = self._read(path)
        thing.flushed = thing.now
        thing.listed = None if thing.listed is None else dict(thing.lists)

    def forget(self, inode: int) -> None:
        """The number is free for another file."""
        self._things.pop(inode, None)

    def _read(self, path: Path) -> _Thing:
        inode, is_folder = path.stat().st_ino, path.is_dir()
        thing = self._things.setdefault(inode, _Thing(listed={} if is_folder else None))
        if is_folder:
            thing.lists = {child.name: self._read(child) for child in path.iterdir()}
        else:
            thing.now = path.read_bytes()
        return thing


def _fill(tree: dict[str, bytes | None], name: str, thing: _Thing, listed, names, content) -> None:
    if thing.listed is None:
        tree[name] = content(thing)
        return
    if name:
        tree[name] = None
    for child, found in names(thing, listed).items():
        known = thing.listed.get(child) is found
        _fill(tree, f"{name}/{child}", found, listed and known, names, content)


@contextmanager
def watched(root: Path) -> Iterator[Disk]:
    """Watch the body at work; what is below ``root`` before it is on disk."""
    disk = Disk(root)
    for path in (root, *root.rglob("*")):
        disk.flush(path)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, _stopping_at(disk, name, getattr(os, name)))
        yield disk
    disk.look()


def _stopping_at(disk: Disk, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def stop(*args: Any, **options: Any) -> Any:
        disk.look()
        freed = _freed(name, args, options)
        result = call(*args, **options)
        if freed is not None:
            disk.forget(freed)
        if name == "fsync":
            disk.flush(Path(f"/proc/self/fd/{args[0]}").resolve())
        disk.look()
        return result

    return stop


def _freed(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> int | None:
    """The inode that loses its name by this call."""
    if name in ("fsync", "mkdir"):
        return None
    target = args[1] if name in ("replace", "rename") else args[0]
    try:
        found = os.stat(target, dir_fd=options.get("dir_fd"))
    except FileNotFoundError:
        return None
    return None if stat.S_ISDIR(found.st_mode) and name == "unlink" else found.st_ino


def rebuilt(tree: Tree, folder: Path) -> Path:
    """What a cut left, as a folder."""
    folder.mkdir(parents=True)
    for name, content in tree.items():
        path = folder / name.lstrip("/")
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
    return folder
