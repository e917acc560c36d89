"""What a file on this machine is, and its columns, without the libraries that read it.

A wrong name is thus refused before they are loaded, which takes seconds.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from collapipe_flwr.core.errors import DataError

CONLL_SUFFIXES = (".conll", ".bio", ".iob", ".iob2")
UNREADABLE = (OSError, EOFError, zlib.error)  # what gzip raises for damaged files
_TABLES = (".csv", ".tsv")
_FIRST_LINE = ", or put a line of column names first if these are a row of the data"
_HEADER_BYTES = 1 << 20
FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".txt": "text",
    **dict.fromkeys(CONLL_SUFFIXES, "conll"),
}
_NO_TEXT = re.compile("[\0-\x08\x0e-\x1f\x7f\ufffd]")
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}


@contextmanager
def open_file(path: Path, key: str) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if it is gzip; raises DataError if it cannot be read."""
    opening: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opening(path, "rb") as file:
            yield file
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise DataError(
            f'{key} "{path}" could not be read ({error}): give a file that is whole, in UTF-8, and '
            "packed by gzip where its name ends in .gz"
        ) from error


def suffix_of(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return plain.suffix.lower()


def read_header(path: Path, separator: str, key: str) -> list[str]:
    with open_file(path, key) as file:
        start = file.read(_HEADER_BYTES).decode("utf-8-sig", errors="replace")
    csv.field_size_limit(max(csv.field_size_limit(), _HEADER_BYTES))  # texts may be long
    rows = csv.reader(io.StringIO(start, newline=""), delimiter=separator)
    names = next(rows, [])
    first = next((row for row in rows if row and (len(row) > 1 or row[0].strip())), [])
    if not names and not start.strip():
        raise DataError(
            f'{key} "{path}" is empty: give a file with a line of column names, then examples'
        )
    if any(map(_NO_TEXT.search, names)):
        raise DataError(
            f'{key} "{path}" does not begin with text in UTF-8: save the file as UTF-8, or let its '
            "name end as its format asks, such as .csv.gz or .parquet"
        )
    if not names or len(set(names)) < len(names):
        raise DataError(
            f'{key} "{path}" must begin with a line of distinct column names, got {names}: '
            "give each column its own name"
        )
    if len(names) == 1 and (other := next((c for c in _SEPARATORS if c in names[0]), "")):
        raise DataError(
            f'{key} "{path}" has {_SEPARATORS[other]} in its first line, but columns are separated '
            "by commas in .csv and by tabs in .tsv files: save it so"
        )
    # As pandas calls a column without a name, such as the row numbers that it writes.
    names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
    if len(first) > len(names):  # pandas would shift columns
        raise DataError(
            f'{key} "{path}" has a row with {len(first)} fields after a first line with '
            f"{len(names)} names: give every field a name"
        )
    return names


def read_column_names(path: Path, key: str) -> Sequence[str]:
    """Return the columns of a file, or none where only its reader knows them; raises DataError."""
    kind = FORMATS.get(suffix_of(path))
    if kind == "csv":
        return read_header(path, "\t" if suffix_of(path) == ".tsv" else ",", key)
    if kind == "conll":
        return ("tokens", "tags")
    if kind == "text":
        return ("text",)
    return _read_fields(path, key) if kind == "json" else ()


def _read_fields(path: Path, key: str) -> Sequence[str]:
    """Return the fields of a short file of JSON lines; none of any other."""
    with open_file(path, key) as file:
        lines = file.read(_HEADER_BYTES).splitlines()
        if file.read(1):
            return ()
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except ValueError:  # its reader says why
        return ()
    return tuple(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))


def no_such_column(key: str, name: str, of: str, names: Sequence[str]) -> DataError:
    """Make the error for a column that a table does not have."""
    shown = (known if known == known.strip() else f'"{known}"' for known in names)
    is_table = of.removesuffix(".gz").endswith(_TABLES)
    return DataError(
        f'{key} "{name}" is not a column of "{of}", which has {", ".join(shown)}: name one of them'
        f"{_FIRST_LINE if is_table else ''}"
    )
