"""``python -m tests.program CODE ARGUMENTS``: ``python -c`` where only a module can be run."""

import sys

if __name__ == "__main__":
    _, code, *arguments = sys.argv
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
