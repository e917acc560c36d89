"""``python -m tests.membership.at_1970 ARGUMENTS``: `collapipe` on a board without a battery.

Its clock starts at 1970. TLS libraries have clocks of their own, which stay right.
"""

import datetime
import sys
import time

_real, _begin_s = time.time, time.time()


class _Past(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(time.time(), tz)


if __name__ == "__main__":
    time.time = lambda: _real() - _begin_s
    datetime.datetime = _Past  # type: ignore[misc]
    from collapipe_flwr.__main__ import main

    sys.exit(main())
