"""Figures that members measured when they joined, in the file that plans use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from collapipe_flwr.cluster.profile import Measured, Measurements, read_measurements
from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.transport.roster import Roster


def read_figures(config: ClusterConfig) -> Measurements:
    """Read the figures of a cluster; raises ConfigError for a file that cannot be read."""
    if config.measured is None or not config.measured.exists():
        return Measurements(cluster_id=config.id, members=())
    return read_measurements(config.measured)


def note_figures(config: ClusterConfig, found: Iterable[Measured]) -> None:
    """Replace the figures of these members, until a check measures again."""
    assert config.measured is not None
    before, new = read_figures(config), {member.name: member for member in found}
    others = (member for member in before.members if member.name not in new)
    after = replace(before, members=(*others, *new.values()))
    if after != before or not config.measured.exists():
        write_text(config.measured, to_json(after) + "\n")


def add_figures(config: ClusterConfig, roster: Roster) -> None:
    """Add the figures that came with a roster, of members at an address without figures here.

    What a check measured here takes precedence. Raises ProtocolError for malformed figures.
    """
    if not roster.figures:
        return
    try:
        brought = from_json(Measurements, roster.figures, "figures")
    except ProtocolError as error:
        raise ProtocolError(f"the roster came with invalid figures: {error}") from error
    known = {member.name: member.address for member in read_figures(config).members}
    new = (m for m in brought.members if known.get(m.name, m.address + "?") not in ("", m.address))
    note_figures(config, new)
