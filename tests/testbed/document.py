"""The code blocks of a page of documentation: where each belongs, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(bash|toml)\n# (?:on )?(.+?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``place`` is what its first line says: the machines of commands, the file of TOML."""

    section: int
    language: str
    place: str
    text: str


def blocks_of(page: Path, level: str = "##") -> list[Block]:
    """All blocks of the numbered sections of one level; each must say where it belongs."""
    text = page.read_text()
    sections = re.finditer(rf"^{level} (\d+)\. ", text, re.MULTILINE)
    starts = [(int(m[1]), m.start()) for m in sections]
    ends = [start for _, start in starts[1:]] + [text.index("\n## ", starts[-1][1] + 1)]
    blocks = [
        Block(section=number, language=m[1], place=m[2], text=m[3])
        for (number, start), end in zip(starts, ends, strict=True)
        for m in _BLOCK.finditer(text[start:end])
    ]
    fences = text[starts[0][1] : ends[-1]].count("\n```")
    assert fences == 2 * len(blocks), "a block of the page does not say where it belongs"
    return blocks
