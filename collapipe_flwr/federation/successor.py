"""A process that begins anew: it executes itself, and only its listening socket stays open.

The socket is handed over by systemd's protocol (``LISTEN_FDS``), so that those who connect
meanwhile wait instead of failing. All else that was open ends, as it would with the process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict
from typing import NoReturn

from collapipe_flwr.federation.app_code import AppCode

_CODE = "COLLAPIPE_CONTROL_UNIT_CODE"  # what the process was executed for, as JSON
_PATH = "COLLAPIPE_CONTROL_UNIT_PATH"  # PYTHONPATH as its first life found it
_FIRST_FD = 3


def begin_anew(listener: socket.socket, code: AppCode) -> NoReturn:
    """Execute this command once more, with the folder of ``code`` before all others."""
    path = os.environ.get(_PATH, os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "LISTEN_FDS": "1",
        "LISTEN_PID": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (code.folder, path))),
        "PYTHONSAFEPATH": "1",  # where the command was given, other files of that name may lie
        _PATH: path,
        _CODE: json.dumps(asdict(code)),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(listener.fileno(), _FIRST_FD)
    os.set_inheritable(_FIRST_FD, True)
    os.closerange(_FIRST_FD + 1, os.sysconf("SC_OPEN_MAX"))
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def inherited_listener() -> socket.socket | None:
    """The listening socket that systemd, or an earlier life of this process, handed over."""
    given = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    if given != (str(os.getpid()), "1"):
        return None
    os.set_inheritable(_FIRST_FD, False)
    return socket.socket(fileno=_FIRST_FD)


def wanted_code() -> AppCode | None:
    """What this process was executed for; None in its first life."""
    told = os.environ.pop(_CODE, "")
    return AppCode.of_json(json.loads(told)) if told else None
