"""Which run a page shows: the one that was named, or the newest."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.live.feed import Find
from collapipe_flwr.reporting.run_directory import LOG
from collapipe_flwr.reporting.run_lock import CONFIG


def run_finder(run: Path | None, output_dir: Path) -> Find:
    """Names the run to show, again and again; raises ConfigError for what cannot become one."""
    if run is None:
        _check_folder(output_dir, "--output-dir")
        return lambda: newest_run(output_dir)
    if run.is_dir() and _began_s(run) is None and any(run.iterdir()):
        raise ConfigError(
            f"{run} is not the folder of a run: name one that `collapipe run` printed, or give "
            f"--output-dir {run} for the newest run in it"
        )
    _check_folder(run, "RUN")
    _check_folder(run.parent, "RUN")
    if not run.parent.is_dir():
        raise ConfigError(f"{run}: there is no folder {run.parent} in which it could come to be")
    return lambda: run


def newest_run(folder: Path) -> Path | None:
    """The run directory that began last; None while there is none."""
    found = [(began_s, path) for path in _folders(folder) if (began_s := _began_s(path))]
    return max(found)[1] if found else None


def _folders(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def _began_s(run: Path) -> float | None:
    """When the run-config was written, or the log was, before it; None for no run."""
    for name in (CONFIG, LOG):
        with suppress(FileNotFoundError, NotADirectoryError):
            return (run / name).stat().st_mtime
    return None


def _check_folder(path: Path, what: str) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{what} {path} is a file: name a folder")
