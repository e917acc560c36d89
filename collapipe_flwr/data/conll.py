"""CoNLL files: a word per line with its tag last, an empty line between sentences."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.core.extras import extra

with extra("data"):
    from datasets import Dataset

SUFFIXES = (".conll", ".bio", ".iob", ".iob2")
_DOCUMENT = "-DOCSTART-"
_UNIVERSAL = re.compile(r"# \S+ = ")


def read_conll(path: Path, key: str) -> Dataset:
    """A table with the columns ``tokens`` and ``tags``; raises DataError, naming ``key``."""
    opening = gzip.open if path.suffix == ".gz" else open
    try:
        with opening(path, "rt", encoding="utf-8") as file:
            sentences = list(_sentences(file, f'{key} "{path}"'))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f'{key} "{path}" could not be read: {error}') from error
    if not sentences:
        raise DataError(f'{key} "{path}" has no sentences: give a file with a word per line')
    return Dataset.from_dict(
        {
            "tokens": [[word for word, _ in sentence] for sentence in sentences],
            "tags": [[tag for _, tag in sentence] for sentence in sentences],
        }
    )


def _sentences(lines: Iterable[str], what: str) -> Iterator[list[tuple[str, str]]]:
    sentence: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if _UNIVERSAL.match(line):
            raise DataError(
                f"{what} has the comment {line.strip()!r} in line {number}, as CoNLL-U files do: "
                "write a word and its tag in every line, nothing else"
            )
        fields = line.split()
        if fields and fields[0] != _DOCUMENT:
            if len(fields) < 2:
                raise DataError(
                    f"{what} has the word {fields[0]!r} without a tag in line {number}: write a "
                    "word and its tag in every line, separated by a space"
                )
            sentence.append((fields[0], fields[-1]))
        elif sentence:
            yield sentence
            sentence = []
    if sentence:
        yield sentence
