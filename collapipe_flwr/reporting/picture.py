"""One figure as a picture file, which appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from collapipe_flwr.core.durable import write_file
from collapipe_flwr.core.errors import ConfigError

if TYPE_CHECKING:  # matplotlib is an optional extra
    from matplotlib.figure import Figure

DPI = 120


def write_picture(figure: Figure, path: Path) -> None:
    """Replace ``path``; raises ConfigError when it cannot be written."""
    try:
        write_file(path, lambda written: figure.savefig(written, dpi=DPI))
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error})") from error
