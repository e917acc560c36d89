"""Libraries that transformers loads wherever they are installed, and that no host has a use for.

They match boxes and score text; a device that loads them holds some 40 MB more for as long as it
lives. A name without a module in `sys.modules` is how Python says that there is none to import.
"""

from __future__ import annotations

import sys
from typing import cast

SPARED = ("scipy", "sklearn")


def spare_libraries() -> None:
    """Have this process do without them, unless one is loaded already."""
    modules = cast("dict[str, object]", sys.modules)
    for name in SPARED:
        modules.setdefault(name, None)
