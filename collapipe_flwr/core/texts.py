"""Conversion of strangers' text for a log, a terminal or a metric's label."""

from __future__ import annotations

SHORT, LINE = 80, 400  # characters of a name and of a sentence that others are shown
MOST = 16_000  # characters of an error with its traceback


def make_printable(text: str) -> str:
    """Make text of bounded length printable line by line; the middle may be left out.

    Unprintable characters become ``?``: controls and escapes, marks that turn the direction of
    writing, and halves of surrogate pairs, which cannot be encoded.
    """
    if len(text) > MOST:
        text = f"{text[: MOST // 2]} ... {text[-MOST // 2 :]}"
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def to_one_line(text: str, most: int = LINE) -> str:
    """Make words printable on one line of ``most`` characters."""
    line = " ".join(make_printable(" ".join(text.split())).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."
