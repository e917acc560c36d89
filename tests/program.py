"""``python -m tests.program CODE ARGUMENTS``: ``python -c`` where only a module can be run."""

import contextlib
import io
import runpy
import sys
from pathlib import Path


def printed_by(script: Path, *arguments: str) -> str:
    """What ``python SCRIPT ARGUMENTS`` prints, without a process of its own."""
    kept, sys.argv = sys.argv, [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as Python does
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = kept
        sys.path.remove(str(script.parent))
    return text.getvalue()


if __name__ == "__main__":
    _, code, *arguments = sys.argv
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
