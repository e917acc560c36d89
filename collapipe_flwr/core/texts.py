"""Text of strangers, fit for a log, a terminal and a metric's label."""

from __future__ import annotations

SHORT, LINE = 80, 400  # characters of a name and of a sentence that others are shown


def one_line(text: str, most: int = LINE) -> str:
    """One line of bounded length; what no screen shows as it is becomes ``?``.

    That is every character that `str.isprintable` refuses: controls and escapes, marks that turn
    the direction of writing, and halves of surrogate pairs, which no encoding has.
    """
    words = " ".join(text[: 4 * most].split())
    line = "".join(c if c.isprintable() else "?" for c in words)
    return line if len(line) <= most else f"{line[: most - 3]}..."
