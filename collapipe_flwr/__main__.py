"""The program ``collapipe``, which Ctrl-C ends without a traceback while it is still loading."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line; the entry point of ``collapipe``."""
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored
    if hears:
        signal.signal(signal.SIGINT, _leave)
    from collapipe_flwr.cli import main as run

    if hears:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(*_: object) -> None:
    """End at once: a KeyboardInterrupt within an import may become any other error."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
