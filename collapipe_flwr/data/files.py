"""Tables by ``datasets.load_dataset``: a local file, a directory or a hub data set.

Every failure becomes one DataError that names the run-config key.
"""

from __future__ import annotations

import errno
import glob
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from shutil import rmtree
from threading import Lock
from typing import Any

from collapipe_flwr.core.errors import DataError, name_extra
from collapipe_flwr.core.hub import (
    expand_home,
    explain_no_path,
    is_folder_only,
    is_reachable,
    silence,
)
from collapipe_flwr.data.headers import FORMATS, UNREADABLE, open_file, read_header, suffix_of
from collapipe_flwr.data.reader import format_rows, split_words

with name_extra("data"):
    import pandas
    import pyarrow
    import pyarrow.json
    from datasets import (
        Dataset,
        DatasetDict,
        Features,
        Value,
        disable_progress_bars,
        load_dataset,
        load_from_disk,
    )
    from datasets import config as datasets_config
    from datasets.exceptions import DatasetsError
    from datasets.utils import logging

_patching = Lock()
_DOCUMENT = "-DOCSTART-"
_UNIVERSAL = re.compile(r"# \S+ = ")


def read_conll(path: Path, key: str, *, skip_bad_rows: bool = False) -> Dataset:
    """Read a table with the columns ``tokens`` and ``tags``; raises DataError, naming ``key``.

    Words without a tag are refused, or make rows with fewer tags than words.
    """
    what = f'{key} "{path}"'
    with open_file(path, key) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        lines = list(text)
    for number, line in enumerate(lines, start=1):
        if _UNIVERSAL.match(line):
            raise DataError(
                f"{what} has the comment {line.strip()!r} in line {number}, as CoNLL-U files do: "
                "write a word and its tag in every line, nothing else"
            )
    rows = [split_words(line) if line.strip() else [] for line in lines]
    bare = [n for n, fields in enumerate(rows) if len(fields) == 1 and fields[0] != _DOCUMENT]
    if bare and not skip_bad_rows:
        raise DataError(
            f"{what} has {len(bare)} words without a tag, in {format_rows(bare, 'line')}: write a "
            "word and its tag in every line, separated by a space, or leave these sentences out "
            "by data.skip-bad-rows=true"
        )
    parts = groupby(rows, lambda fields: not fields or fields[0] == _DOCUMENT)
    sentences = [list(lines) for is_between, lines in parts if not is_between]
    if not sentences:
        raise DataError(f"{what} has no sentences: give a file with a word and its tag per line")
    return Dataset.from_dict(
        {
            "tokens": [[fields[0] for fields in sentence] for sentence in sentences],
            "tags": [[fields[-1] for fields in s if len(fields) > 1] for s in sentences],
        }
    )


_SAVED = ("state.json", "dataset_dict.json")  # written by save_to_disk of datasets
_WRONG = (ValueError, TypeError, KeyError, AttributeError)  # what datasets trips over
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_DATA = ("corresponds to no data", "BatchSize must be greater than 0")  # as datasets says it


def load_table(
    name: str,
    *,
    key: str,
    split: str,
    only_split_serves: bool = True,
    skip_bad_rows: bool = False,
    grows: bool = False,
) -> Dataset:
    """Load the rows of a file, a directory or a hub data set.

    Files are ``.csv .tsv .json .jsonl .parquet``, ``.txt`` (a column ``text``, a row per line that
    is not empty), or of the CoNLL kind (columns ``tokens`` and ``tags``), all also ``.gz``. A hub
    data set is written ``name``, ``name:config`` or ``name:config:split``, a split of a directory
    ``DIRECTORY:split``.

    ``split`` is taken where a directory or hub data set has several and ``name`` names none. With
    ``only_split_serves`` the only split of a directory is taken, whatever its name. Of a file that
    ``grows``, the cache of datasets keeps the newest version only. Raises DataError, naming
    ``key``.
    """
    disable_progress_bars()
    path = expand_home(name)
    builder = FORMATS.get(suffix_of(path))
    if path.is_file():
        if builder is None:
            raise DataError(
                f'{key} "{name}" is in no format that can be read: use one of '
                f"{', '.join(FORMATS)}, optionally followed by .gz"
            )
        if builder == "conll":
            return read_conll(path, key, skip_bad_rows=skip_bad_rows)
        cache = _make_cache_of_version(path) if grows else _find_cache()
        options: dict[str, Any] = {
            "data_files": glob.escape(str(path)),
            "split": "train",
            "cache_dir": str(cache),
        }
        options |= _choose_options(path, key)
        rows = _require_rows(_load(key, name, builder, **options), key, name)
        return drop_empty_rows(rows) if builder == "text" else rows
    if path.is_dir():
        return _load_folder(path, key=key, split=split, only_split_serves=only_split_serves)
    folder, chosen = _split_name(name)
    if chosen:
        return _load_folder(folder, key=key, split=chosen, only_split_serves=False)
    if builder is not None or is_folder_only(name):
        raise DataError(explain_no_path(key, name))
    hub_name, config, hub_split = (*name.split(":"), "", "")[:3]
    is_reachable()
    options = {"name": config or None, "split": hub_split or split}
    return _require_rows(_load(key, name, hub_name, **options), key, name)


def _find_cache() -> Path:
    """Return our own cache for this machine's files: in others, JSON has dates for texts."""
    return Path(datasets_config.HF_DATASETS_CACHE, "collapipe")


def _make_cache_of_version(path: Path) -> Path:
    """Return the cache of a file as it is now; delete those of its earlier versions.

    In datasets' common cache each version would stay, as large as the whole file.
    """
    found, digest = path.stat(), sha256(str(path.absolute()).encode()).hexdigest()
    versions = _find_cache() / digest[:32]
    newest = versions / f"{found.st_size}-{found.st_mtime_ns}"
    for version in versions.glob("*"):
        if version != newest:
            rmtree(version, ignore_errors=True)
    return newest


def is_one_table(name: str) -> bool:
    """Return whether ``name`` stands for the same rows with any ``split``."""
    chosen = _split_name(name)[1]
    return expand_home(name).is_file() or bool(chosen) or name.count(":") > 1


def _split_name(name: str) -> tuple[Path, str]:
    """Return the parts of ``DIRECTORY:split``; an empty split for anything else."""
    before, _, split = name.rpartition(":")
    folder = expand_home(before)
    return folder, split if before and folder.is_dir() else ""


def _choose_options(path: Path, key: str) -> dict[str, Any]:
    """Choose options that read every CSV column as text: "007" and "NA" stay unchanged.

    A byte order mark is not part of a text.
    """
    if FORMATS[suffix_of(path)] == "text":
        return {"encoding": "utf-8-sig"}
    if FORMATS[suffix_of(path)] != "csv":
        return {}
    separator = "\t" if suffix_of(path) == ".tsv" else ","
    features = Features({name: Value("string") for name in read_header(path, separator, key)})
    return {"sep": separator, "features": features, "keep_default_na": False}


def _load_folder(path: Path, *, key: str, split: str, only_split_serves: bool) -> Dataset:
    """Load a split of a folder of files, or of one that ``save_to_disk`` of datasets wrote."""
    found: Dataset | DatasetDict
    if not any((path / name).is_file() for name in _SAVED):
        base, below = _escape_patterns(path)
        found = _load(key, str(path), base, data_dir=below, cache_dir=str(_find_cache()))
    else:
        try:
            found = load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f'{key} "{path}" could not be loaded: {error}') from error
    if isinstance(found, Dataset):
        if not only_split_serves:
            raise DataError(
                f'{key} "{path}" has no split "{split}", since it holds one table: leave the split '
                "out, and data.test empty to hold out a share of the rows, or save a DatasetDict"
            )
        return _require_rows(found, key, str(path))
    if only_split_serves and len(found) == 1:
        split = next(iter(found))
    if split not in found:
        raise DataError(
            f'{key} "{path}" has no split "{split}", only {", ".join(found)}: name one, such as '
            f'"{path}:{next(iter(found))}"'
        )
    return _require_rows(found[split], key, str(path))


def _escape_patterns(path: Path) -> tuple[str, str | None]:
    """Return a folder for `load_dataset`, which takes ``[`` for a pattern unless escaped.

    It can escape only what is below a folder without any.
    """
    if not glob.has_magic(str(path)):
        return str(path), None
    whole = path.absolute()
    base = next(folder for folder in whole.parents if not glob.has_magic(str(folder)))
    return str(base), glob.escape(str(whole.relative_to(base)))


def _load(key: str, shown: str, source: str, **options: Any) -> Any:
    try:
        with warnings.catch_warnings(), silence(logging), keep_texts():
            # datasets leaves CSV files open until garbage collection
            warnings.simplefilter("ignore", ResourceWarning)
            return load_dataset(source, **options)
    except (*UNREADABLE, *_WRONG, RuntimeError, StopIteration, DatasetsError) as error:
        if full := _explain_cache_error(error):
            raise DataError(full) from error
        local = expand_home(shown).is_file()
        raise DataError(f'{key} "{shown}" could not be loaded {_explain(error, local)}') from error


def _require_rows(table: Dataset, key: str, shown: str) -> Dataset:
    if len(table) == 0:
        raise DataError(f'{key} "{shown}" has no rows: give a file with examples')
    return table


def _explain_cache_error(error: BaseException | None) -> str:
    """Return the message for a cache that cannot be written; empty for any other error."""
    cache = Path(datasets_config.HF_DATASETS_CACHE)
    while error is not None:
        if isinstance(error, OSError) and (
            error.errno in _FULL or _is_about(str(error.filename or "."), cache)
        ):
            return (
                f"the cache of datasets, {cache}, cannot be written ({error.strerror}): make room "
                "or change its rights, or set the environment variable HF_HOME to another folder"
            )
        error = error.__cause__ or error.__context__
    return ""


def _is_about(name: str, cache: Path) -> bool:
    """Return whether a path is within the cache, or one of the folders that hold it."""
    return Path(name).is_relative_to(cache) or (name != "." and cache.is_relative_to(name))


_WAYS_OUT = {  # by what a library says of a file
    "utf-8": "save the file as UTF-8",
    "invalid utf": "save the file as UTF-8",
    "eof inside string": "close the quotation mark that opens a field there, or write it twice "
    "where it belongs to the text",
    "fields in line": "put texts that hold the separator in quotation marks",
    "json parse error": "write one object per line, in UTF-8",
    "": "save it again in the format that its name says",
}


def _explain(error: BaseException, local: bool) -> str:
    """Return the error of datasets, and what to do with a local file or another name."""
    cause = error.__cause__ or error
    first = str(cause).strip().split("\n", maxsplit=1)[0] or "it is empty"
    if any(words in first for words in _NO_DATA):
        return "(it has no rows): give a file with examples"
    if local:
        said = next(said for said in _WAYS_OUT if said in first.lower())
        return f"({first}): {_WAYS_OUT[said]}"
    return (
        f"({first}): give a local CSV or JSON file, or a hub data set that this machine can reach"
    )


def drop_empty_rows(table: Dataset) -> Dataset:
    """Return the rows whose ``text`` is not empty."""
    return table.select([row for row, text in enumerate(table["text"]) if text.strip()])


@contextmanager
def keep_texts() -> Iterator[None]:
    """Let datasets keep every text of JSON files as it is written.

    The library infers types: texts that look like dates become points in time, whose texts are
    others (``2020-03-05`` becomes ``2020-03-05 00:00:00``), and its second reader, for what the
    first cannot read, makes numbers of texts. It has no option for that, so its functions are
    replaced, in one thread at a time.
    """
    with _patching:
        arrow, panda = pyarrow.json.read_json, pandas.read_json
        pyarrow.json.read_json = partial(_read_json, arrow)
        pandas.read_json = _refuse_json
        try:
            yield
        finally:
            pyarrow.json.read_json, pandas.read_json = arrow, panda


def _refuse_json(*_: Any, **__: Any) -> Any:
    raise ValueError("only objects, one per line or in one list, keep their texts")


def _read_json(read: Any, source: Any, **options: Any) -> Any:
    """Read the table of a JSON file; once more, with the types known, if it would hold dates."""
    table = read(source, **options)
    table.validate(full=True)  # it need not be UTF-8
    fields = [pyarrow.field(field.name, _replace_dates(field.type)) for field in table.schema]
    schema = pyarrow.schema(fields)
    if schema == table.schema:
        return table
    source.seek(0)
    return read(source, parse_options=pyarrow.json.ParseOptions(explicit_schema=schema), **options)


def _replace_dates(kind: Any) -> Any:
    """Return the type with texts in place of points in time, at any depth."""
    if pyarrow.types.is_temporal(kind):
        return pyarrow.string()
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_replace_dates(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_replace_dates(field.type)) for field in kind])
    return kind
