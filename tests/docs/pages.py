"""What the documents say that a program can check: code blocks, commands, keys, links, paths."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .+\n)+", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_HEREDOC = re.compile(r"^(.*)<<'(\w+)'\n.*?^\2$", re.MULTILINE | re.DOTALL)
_OPERATORS = "|&;<>()"


@dataclass(frozen=True)
class Said:
    """Something that a page says."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


@cache
def blocks(language: str) -> list[Said]:
    """The fenced blocks of a language, on all pages."""
    return [
        Said(page, match[1], match[2])
        for page in PAGES
        for match in _FENCE.finditer(page.read_text(encoding="utf-8"))
        if match[1] == language
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _COMMENT.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


@cache
def inline() -> list[Said]:
    """Inline code on all pages, a line break within it taken as a space."""
    return [
        Said(page, "", re.sub(r"\s+", " ", match[1]))
        for page in PAGES
        for match in _CODE.finditer(_INDENTED.sub("", prose(page)))
    ]


def links() -> list[Said]:
    """Links to other files and to headings; addresses of other sites are left out."""
    return [
        Said(page, "", match[1])
        for page in PAGES
        for match in _LINK.finditer(prose(page))
        if not re.match(r"[a-z]+:", match[1])
    ]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return {_slug(match[1]) for match in _HEADING.finditer(prose(page))}


@cache
def commands(program: str) -> list[tuple[Said, list[str]]]:
    """The arguments of every call of ``program`` in shell blocks and indented lines."""
    return [
        (block, arguments)
        for block in (*blocks("bash"), *_indented())
        for words in _simple_commands(block.text)
        for arguments in _arguments(words, program)
    ]


def _indented() -> Iterator[Said]:
    for page in PAGES:
        for match in _INDENTED.finditer(prose(page)):
            if re.match(r" {4}(collapipe|python|pip) ", match[0]):
                yield Said(page, "bash", match[0])


def _simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command; text of here-documents is left out."""
    for line in _HEREDOC.sub(r"\1", text).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in lexer:
            if set(word) <= set(_OPERATORS):
                yield words
                words = []
            else:
                words.append(word)
        yield words


def _arguments(words: list[str], program: str) -> Iterator[list[str]]:
    """What follows the program's name; a word behind an option or `userdel`, a user, is not one."""
    for place, word in enumerate(words):
        called = word == program or word.endswith(f"bin/{program}")
        if called and not (place and words[place - 1].startswith(("-", "userdel"))):
            yield words[place + 1 :]
            return


def _slug(heading: str) -> str:
    """As the site makes it, and GitHub for headings without other characters."""
    text = re.sub(r"[^\w\s-]", "", re.sub(r"`", "", heading)).strip().lower()
    return re.sub(r"[-\s]+", "-", text)
