"""A cluster as the text of its file, for clusters that `collapipe cluster` keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

from collapipe_flwr.config.cluster_file import ClusterConfig, ClusterLinks, MemberConfig, TlsConfig
from collapipe_flwr.config.parsing import flatten_section
from collapipe_flwr.core.keys import Value

_HEAD = """\
# Kept by `collapipe cluster` where it was made, and written anew when a member joins or is removed.
# Figures and [links] may be edited there; comments are lost.
"""


def cluster_text(config: ClusterConfig) -> str:
    """The TOML that `parse_cluster` reads as ``config``; keys with their defaults are left out."""
    top: dict[str, Value] = {"id": config.id, "version": config.version}
    if config.joining:
        top["joining"] = config.joining
    if config.measured is not None:
        top["measured"] = os.path.relpath(config.measured, config.folder)
    tables = [
        ("[control-unit]", _member(config.control_unit, "control-unit")),
        *(("[[device]]", _member(device, "")) for device in config.devices),
        ("[edge]", _member(config.edge, "edge")),
        ("[server]", _member(config.server, "server")),
        ("[links]", _changed(config.links, ClusterLinks())),
    ]
    if config.tls is not None:
        tables.append(("[tls]", _changed(config.tls, TlsConfig())))
    lines = [*_lines(top), *(line for head, keys in tables for line in _table(head, keys))]
    return _HEAD + "\n".join(lines) + "\n"


def _member(member: MemberConfig, role: str) -> dict[str, Value]:
    return _changed(member, MemberConfig(name=role))


def _changed(section: object, default: object) -> dict[str, Value]:
    usual = flatten_section(default, "")
    return {k: value for k, value in flatten_section(section, "").items() if value != usual[k]}


def _table(head: str, keys: Mapping[str, Value]) -> Iterator[str]:
    if keys or head == "[tls]":
        yield ""
        yield head
        yield from _lines(keys)


def _lines(keys: Mapping[str, Value]) -> Iterator[str]:
    """JSON's strings, numbers and booleans are TOML's, too."""
    return (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in keys.items())
