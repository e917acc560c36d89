"""``python -m collapipe_flwr.cli.child ...``: a ``collapipe`` command that ends with its parent."""

from __future__ import annotations

from collapipe_flwr.cli import main
from collapipe_flwr.core.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
