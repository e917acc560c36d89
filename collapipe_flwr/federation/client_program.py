"""The program `flwr-clientapp` of `client_process`: has its work done by a fork that is ready.

It imports next to nothing, stays while the fork works, and ends as it does. Should it be killed,
so is the fork. Where nobody answers at the socket beside it, it becomes Flower's program.
"""

import marshal
import os
import socket
import sys

SOCKET = "fork"  # beside this program
ALONE = "alone"  # a file beside it: what to run where nobody answers
_LENGTH = 4  # bytes


def main() -> int:
    """The fork's exit code, 1 where it ended without one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with socket.socket(socket.AF_UNIX) as peer:
        try:
            peer.connect(os.path.join(folder, SOCKET))
        except OSError:
            with open(os.path.join(folder, ALONE), encoding="utf-8") as file:
                alone = file.read()
            os.execv(sys.executable, [sys.executable, "-P", alone, *sys.argv[1:]])
        order = marshal.dumps((sys.argv, os.getcwd(), dict(os.environ)))
        socket.send_fds(peer, [len(order).to_bytes(_LENGTH, "big")], [0, 1, 2])
        peer.sendall(order)
        code = peer.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    sys.exit(main())
