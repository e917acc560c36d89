"""The folder of a run: ``summary.json``, ``events.jsonl`` and the trained model.

``run-config.json`` is how the run was started. ``events.jsonl`` gets one line per round as soon as
the round ends. ``summary.json`` is replaced as a whole; its ``status`` is ``running``,
``completed``, ``failed`` or ``stopped``, and ``running`` is read as ``interrupted`` if no process
writes the directory (`run_lock`). A resumed run reopens its folder. Writes are flushed to disk:
after a kill or a power cut at most the end of the last line of ``events.jsonl`` is missing, which
readers skip and a resumed run removes; that round is pending or is trained again. ``run.log`` is
Flower's log as `collapipe run` keeps it.

:class:`Past` is what an earlier process of a run left, up to its newest checkpoint. A process may
die between the checkpoint of a round and its evaluation, so a round is kept as *pending* before it
is evaluated. Rounds after the checkpoint are trained again, so their events are dropped.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collapipe_flwr.core.durable import (
    append_text,
    make_folder,
    make_numbered_folder,
    write_file,
    write_text,
)
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.progress import PROGRESS
from collapipe_flwr.reporting.run_lock import (
    CONFIG,
    LAUNCHER,
    LOG,
    is_written,
    lock_file,
    mark_interrupted,
)

Json = Mapping[str, object]
EVENTS = "events.jsonl"
BY_OWNER = "run this command as their owner, say with `sudo -u collapipe`"
_SUMMARY = "summary.json"
_PENDING, _RUN_ID, _CHECKPOINTS = "pending-round.json", "run-id", "checkpoints"
# Of values of the summary that are not plain text or numbers.
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("metric", "energy", "bytes", "untrained", "lost", "versions"), dict),
    **dict.fromkeys(("peak_memory_bytes", "memory_limit_bytes", "model_share", "plan"), dict),
    **dict.fromkeys(("links", "notes"), list),
    "wall_s": (int, float),
}
_BLOCK_BYTES = 1 << 20
MANY_BYTES = 50_000_000  # of events, which take about a second to read
_ROUND = re.compile(r"round-(\d{6,})")


class RunDirectory:
    """Owns the folder of one run; every write is complete, or absent and a RunError.

    ``tell`` is called with what was written, for those who cannot see the folder (`log_lines`).
    """

    tell: Callable[[str, Json], object] = staticmethod(lambda _kind, _value: None)

    def __init__(self, path: Path, *, numbered: bool = False) -> None:
        """Create the folder; raises ConfigError when it exists (see `is_new`) or cannot be made.

        ``numbered``: where it exists, another one is made (`make_numbered_folder`).
        """
        if not numbered and path.exists() and not (path.is_dir() and is_new(path)):
            raise ConfigError(
                f'output-dir: "{path}" exists already; choose another, or go on with it by resume'
            )
        try:
            if numbered:
                path = make_numbered_folder(path)
            make_folder(path)
        except OSError as error:
            raise ConfigError(
                f'output-dir: "{path}" cannot be made ({error.strerror}); choose another'
            ) from error
        self.path = path

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Open the folder of an earlier run to resume it; raises ConfigError if it is none."""
        if not (path / CONFIG).is_file():
            raise ConfigError(f'resume: "{path}" is not the folder of a run')
        directory = cls.__new__(cls)
        directory.path = path
        return directory

    @property
    def run_id(self) -> str:
        """The id by which clusters recognise the run; drawn on first use."""
        with self._writing():
            return run_id_of(self.path)

    @property
    def checkpoint_path(self) -> Path:
        return self.path / _CHECKPOINTS

    @property
    def model_path(self) -> Path:
        """Where the trained model goes, in the form that transformers loads."""
        return self.path / "model"

    @property
    def adapter_path(self) -> Path:
        """Where trained adapters go besides, in the form that peft loads."""
        return self.path / "adapter"

    def timeline_path(self, server_round: int) -> Path:
        """Return where the timeline of a round goes (``train.timeline``)."""
        return self.path / f"timeline-round{server_round}.json"

    def append_event(self, event: Json) -> None:
        with self._writing():
            append_text(self.path / EVENTS, _line(event))
        self.tell("event", event)

    def rewrite_events(self, events: Iterable[Json]) -> None:
        """Replace ``events.jsonl`` unless it holds just these rounds; without any there is none."""
        events, path = tuple(events), self.path / EVENTS
        text = "".join(map(_line, events))
        before = path.read_bytes() if path.exists() else b""
        if text.encode() != before:
            self._replace(EVENTS, text)
        self.tell("anew", {})
        for event in events:
            self.tell("event", event)

    def write_pending(self, event: Json) -> None:
        """Keep a round that is not evaluated yet, in case this process ends before it is."""
        self._replace(_PENDING, _line(event))

    def write_summary(self, summary: Json) -> None:
        """Replace ``summary.json``."""
        self._replace(_SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")
        self.tell("summary", summary)

    def write_config(self, config: Json, lock: ExitStack | None = None) -> None:
        """Write ``run-config.json``: flat, as Flower takes it.

        ``lock`` gets its lock (`run_lock`) before anyone can see it.
        """

        def save(path: Path) -> None:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            if lock is not None:
                lock.enter_context(lock_file(path))

        with self._writing():
            write_file(self.path / CONFIG, save)
        self.tell("config", config)

    def _replace(self, name: str, text: str) -> None:
        with self._writing():
            write_text(self.path / name, text)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"the run directory {self.path} cannot be written ({error}); make room, then "
                "resume the run"
            ) from error


def is_new(path: Path) -> bool:
    """Return whether a folder holds only what comes before its run, as a log and progress."""
    names = {entry.name for entry in path.iterdir()}
    return LOG in names and all(
        name in (LOG, LAUNCHER) or name.startswith(PROGRESS) for name in names
    )


def _line(event: Json) -> str:
    return json.dumps(event, allow_nan=False) + "\n"


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read the summary of a run; None before there is one. See `run_lock.mark_interrupted`."""
    written = is_written(run_dir)
    summary = read_written_summary(run_dir)
    return None if summary is None else mark_interrupted(summary, run_dir, written)


def read_written_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read the summary as its last process wrote it; None before there is one."""
    path = run_dir / _SUMMARY
    summary = _read(path)
    return None if summary is None else _check_shape(path, summary)


def _check_shape(path: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Drop what is null in a summary; raises RunError for values of another kind."""
    for key, kind in _KINDS.items():
        if summary.get(key, 0) is None:
            del summary[key]
        elif key in summary and not isinstance(summary[key], kind):
            raise RunError(
                f"{path} is damaged ({key} is {summary[key]!r}): bring it back, or start a new run"
            )
    return summary


def find_run(source: str) -> tuple[str, Path]:
    """Find ``LABEL=RUN_DIRECTORY``, or a run directory under the name of its folder.

    Raises ConfigError where there is no summary.
    """
    label, equals, name = source.partition("=")
    if not equals or Path(source).is_dir():
        label, name = Path(source).resolve().name, source
    try:
        known = bool(name) and (Path(name) / _SUMMARY).is_file()
    except PermissionError as error:
        raise ConfigError(f"{name}: its files are not for this user; {BY_OWNER}") from error
    if not known:
        raise ConfigError(
            f"{source} is not the folder of a run: it has no {_SUMMARY}; give RUN_DIRECTORY or "
            "LABEL=RUN_DIRECTORY"
        )
    return label, Path(name)


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """Read the run-config of a run directory, or None where it is none."""
    return _read(run_dir / CONFIG)


def resume_config(run_dir: Path, overrides: Json) -> dict[str, Any]:
    """Make the run-config that resumes a run: its own, with ``overrides`` in front.

    Raises ConfigError if the folder is not that of a run.
    """
    saved = read_config(run_dir)
    if saved is None:
        raise ConfigError(f'--resume: "{run_dir}" is not the folder of a run')
    return {**saved, **overrides, "resume": str(run_dir)}


def run_id_of(folder: Path) -> str:
    """Return the id by which sinks recognise this folder's run; drawn once. Raises OSError."""
    path = folder / _RUN_ID
    if not path.exists():
        write_text(path, secrets.token_hex(16))
    return path.read_text(encoding="utf-8")


def summary_stamp(run_dir: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever the summary is replaced; None without one."""
    try:
        found = (run_dir / _SUMMARY).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def events_bytes(run_dir: Path) -> int:
    """Return the size of the events of all rounds; 0 before the first."""
    path = run_dir / EVENTS
    return path.stat().st_size if path.exists() else 0


def newest_checkpoint(run_dir: Path) -> int:
    """Return the round of the newest checkpoint in a run directory; 0 where there is none."""
    folder = run_dir / _CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(n[1]) for name in names if (n := _ROUND.fullmatch(name))), default=0)


def rounds_done(run_dir: Path) -> int:
    """Return the index of the last round in a run directory; 0 before the first."""
    with suppress(RunError):  # a damaged last line, before which the last round is
        if event := newest_event(run_dir):
            return int(event["round_index"])
    return max((event["round_index"] for event in read_events(run_dir)[-1:]), default=0)


def read_pending(run_dir: Path) -> dict[str, Any] | None:
    """Read the last round that replied, as before its evaluation; None before the first."""
    return _read(run_dir / _PENDING)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read the rounds of a run directory so far, oldest first; see `iter_events`."""
    return list(iter_events(run_dir))


def iter_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield rounds one by one: a long run on many devices writes more than memory holds.

    A damaged last line is skipped; raises RunError for any other that is damaged.
    """
    path = run_dir / EVENTS
    if not path.exists():
        return
    damage: RunError | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if damage is not None:
                raise damage
            if not line.endswith(b"\n"):
                return
            try:
                yield parse_event(path, number, line)
            except RunError as error:
                damage = error


def newest_event(run_dir: Path) -> dict[str, Any] | None:
    """Read the last complete line of ``events.jsonl`` from its end; None without any."""
    path = run_dir / EVENTS
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        place, found = file.seek(0, os.SEEK_END), b""
        while place and found.count(b"\n") < 2:
            step = min(place, _BLOCK_BYTES)
            place -= step
            file.seek(place)
            found = file.read(step) + found
    complete = found.rpartition(b"\n")[0]
    line = complete.rpartition(b"\n")[2]
    return parse_event(path, 0, line) if line else None


def parse_event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse one line of ``events.jsonl``; raises RunError where it is damaged."""
    try:
        event = json.loads(line)
        if not isinstance(event, dict):
            raise ValueError(f"no JSON object, but {type(event).__name__}")
        if not isinstance(event.get("round_index"), int):
            raise ValueError("round_index is no whole number")
    except ValueError as error:
        raise RunError(
            f"{path}, line {number}: no event of a round ({error}); delete the line to go "
            "on without it"
        ) from error
    return event


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"no JSON object, but {type(content).__name__}")
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}): bring it back, or start a new run") from error
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The rounds that a resumed run does not train again."""

    initial: Mapping[str, float] = field(default_factory=dict)  # metrics of the untrained model
    events: tuple[RoundEvent, ...] = ()
    notes: tuple[str, ...] = ()
    pending: RoundEvent | None = None  # the checkpoint's round, if it was not evaluated yet
    wall_s: float = 0.0


def read_past(run_dir: Path, done: int) -> Past:
    """Read the past of a run whose newest checkpoint is of round ``done`` (0: there is none)."""
    if not done:
        return Past()
    events = [RoundEvent.of_json(e) for e in read_events(run_dir) if e["round_index"] <= done]
    pending, summary = read_pending(run_dir) or {}, read_summary(run_dir) or {}
    missing = not events or events[-1].round_index < done
    was_pending = missing and pending.get("round_index") == done
    return Past(
        initial=summary.get("untrained", {}),
        notes=tuple(summary.get("notes", ())),
        events=tuple(events),
        pending=RoundEvent.of_json(pending) if was_pending else None,
        wall_s=summary.get("wall_s", 0.0),
    )
