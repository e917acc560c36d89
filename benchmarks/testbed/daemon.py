"""``collapipe`` on a slow board, in a process that ends with the bench, also if that is killed."""

from __future__ import annotations

from benchmarks.testbed.brake import pay_for_passes
from benchmarks.testbed.trace import trace_host
from collapipe_flwr.cli import main
from collapipe_flwr.core.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    pay_for_passes()
    trace_host()
    main()
