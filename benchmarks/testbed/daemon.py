"""``collapipe`` in a process that ends with the bench, also if that is killed."""

from __future__ import annotations

from collapipe_flwr.cli import main
from collapipe_flwr.core.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
