"""The program `flwr-clientapp` of `client_process`: a ready fork does its work.

It imports next to nothing, waits for the fork and returns its exit code. If it is killed, so is the
fork. Without a fork server it becomes Flower's program.
"""

import marshal
import os
import signal
import socket
import sys

_FORK_S = 20.0  # to wait for a fork


def main(forks_at: str, alone: str) -> int:
    """Return the exit code of the fork made at a socket, 1 if it ended without one.

    ``alone`` is the file to execute if there is no fork server.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:  # a stream that was closed
        pass
    os.close(spare)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(_FORK_S)
        try:
            peer.connect(forks_at)
            forked = peer.recv(1)
        except OSError:
            forked = b""
        if not forked:
            os.execv(sys.executable, [sys.executable, "-P", alone, *sys.argv[1:]])
        peer.settimeout(None)  # as long as the work takes
        socket.send_fds(peer, [b"."], [0, 1, 2])
        peer.sendall(marshal.dumps((sys.argv, os.getcwd(), dict(os.environ))))
        code = peer.recv(1)
    return code[0] if code else 1
