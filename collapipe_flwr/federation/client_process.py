"""`flwr-clientapp` that starts sooner: Flower's program without the imports of its other programs.

Importing `flwr.supernode.cli`, where it lies, imports a web server and a database too, for every
message. `offered` puts a program of that name first on the path of those that start it by name.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_PROGRAM = "flwr-clientapp"
_PACKAGE = "flwr.supernode.cli"
_LONGEST = 120  # bytes of an interpreter's path in a script's first line, on every kernel
_SCRIPT = "#!{python}\nfrom {module} import main\n\nmain()\n"


@contextmanager
def offered() -> Iterator[None]:
    """In the body, processes started with this environment find our program."""
    python = sys.executable
    if len(os.fsencode(python)) > _LONGEST or any(map(str.isspace, python)):
        yield  # a script cannot name it
        return
    before = os.environ.get("PATH", os.defpath)
    with tempfile.TemporaryDirectory(prefix="collapipe-supernode-") as folder:
        program = Path(folder) / _PROGRAM
        program.write_text(_SCRIPT.format(python=python, module=__name__))
        program.chmod(0o700)
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
        try:
            yield
        finally:
            os.environ["PATH"] = before


def main() -> None:
    """Flower's `flwr-clientapp`."""
    above, _, name = _PACKAGE.rpartition(".")
    package = ModuleType(_PACKAGE)
    package.__path__ = [f"{folder}/{name}" for folder in importlib.import_module(above).__path__]
    sys.modules[_PACKAGE] = package  # whose own code would import the other programs
    program = importlib.import_module(f"{_PACKAGE}.flwr_clientapp")
    program.flwr_clientapp()
