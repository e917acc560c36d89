"""JSON as datasets reads it, but with every text as it is written.

The library infers types: texts that look like dates become points in time, whose texts are others
(``2020-03-05`` becomes ``2020-03-05 00:00:00``), and its second reader, for what the first cannot
read, makes numbers of texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

from collapipe_flwr.core.errors import extra

with extra("data"):
    import pandas
    import pyarrow
    import pyarrow.json

_patching = Lock()


@contextmanager
def keep_texts() -> Iterator[None]:
    """Let datasets keep texts of JSON files; in one thread at a time, since it has no option."""
    with _patching:
        arrow, panda = pyarrow.json.read_json, pandas.read_json
        pyarrow.json.read_json = partial(_read, arrow)
        pandas.read_json = _refuse
        try:
            yield
        finally:
            pyarrow.json.read_json, pandas.read_json = arrow, panda


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("only objects, one per line or in one list, keep their texts")


def _read(read: Any, source: Any, **options: Any) -> Any:
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
