"""What can be wrong with a run and is seen at once: missing paths, and columns that a file lacks.

Torch and the libraries of data and models take seconds to load, and are not needed for this. All
that passes is checked again where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from collapipe_flwr.config.parsing import flatten_section, parse_section
from collapipe_flwr.core.errors import DataError, ModelError, prefix_errors
from collapipe_flwr.core.hub import (
    expand_home,
    explain_no_checkpoint,
    explain_no_path,
    is_folder_only,
)
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data.config import TASK_COLUMNS, TRAIN_TOKENIZER, DataConfig, key_of
from collapipe_flwr.data.headers import FORMATS, no_such_column, read_column_names, suffix_of
from collapipe_flwr.models.spec import ModelConfig, check_settings, may_be_type, unknown_type


def look(values: Mapping[str, Value]) -> None:
    """Check paths and columns of a flat run-config; raises ConfigError, DataError or ModelError.

    That of an app with keys of its own may mean something else by them, and is left alone.
    """
    data, model = DataConfig(), ModelConfig()
    if not {*flatten_section(data, "data."), *flatten_section(model, "model.")} <= values.keys():
        return
    data = parse_section(data, "data.", values)
    model = parse_section(model, "model.", values)
    check_paths(data, model)
    for which in ("train", "test"):
        _check_columns(data, which)


def check_paths(data: DataConfig, model: ModelConfig) -> None:
    """Raise DataError or ModelError for a missing file or folder."""
    for which in ("train", "test"):
        name = getattr(data, which)
        path = expand_home(name.rpartition(":")[0] or name)  # DIRECTORY:split, or a file
        is_path = is_folder_only(name) or suffix_of(expand_home(name)) in FORMATS
        if is_path and not (path.exists() or expand_home(name).exists()):
            raise DataError(explain_no_path(key_of(which), name))
    if data.tokenizer not in ("", TRAIN_TOKENIZER) and _is_missing(data.tokenizer):
        raise DataError(
            f"{explain_no_path('data.tokenizer', data.tokenizer)}: give the directory of a saved "
            'tokenizer, a hub name such as owner/model, or "train"'
        )
    if model.pretrained and (why := explain_no_checkpoint("model.pretrained", model.pretrained)):
        raise ModelError(why)
    if not model.pretrained and not may_be_type(model.type):
        with prefix_errors("model.type"):
            raise unknown_type(model.type)
    if not model.pretrained:
        with prefix_errors("model.overrides"):
            check_settings(model.settings, model.type)


def _is_missing(name: str) -> bool:
    return is_folder_only(name) and not expand_home(name).is_dir()


def _check_columns(data: DataConfig, which: str) -> None:
    """Raise DataError for a column that a file of this machine does not have."""
    name = getattr(data, which)
    path = expand_home(name)
    if not name or not path.is_file():
        return
    fields = [f"{ours}_column" for ours in TASK_COLUMNS.get(data.task, ())]
    if which == "train" and data.partition_column:
        fields.append("partition_column")
    names = read_column_names(path, key_of(which))
    for field in fields if names else ():
        theirs = getattr(data, field)
        if not {theirs, theirs.partition(".")[0]}.intersection(names):
            raise no_such_column(key_of(field), theirs, name, names)
