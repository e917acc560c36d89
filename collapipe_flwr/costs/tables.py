"""A snapshot as arrays: the form in which all clusters are priced at once.

Index suffixes: ``_m`` cluster, ``_i`` member (0 is the control unit, n + 1 is ``devices[n]``),
``_l`` block or cut (prefix sums have L + 1 entries; cut 0 lies behind the embedding).
The edge stands behind the last member on the receiver axis of ``gain_mij``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from collapipe_flwr.core.domain import (
    BlockCost,
    ClusterProfile,
    ClusterSnapshot,
    EdgeProfile,
    ModelProfile,
    Snapshot,
)
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.arrays import Array, Ints, Mask
from collapipe_flwr.costs.radio import WIRE_SHARE, find_codec

_Ends = tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]
TINY_GAIN = 1e-30  # stands in for absent links so that logarithms stay finite
FEW_CLUSTERS = 20  # with more, there is no time to replay all candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Prefix sums over blocks, per example; entry l covers blocks ``0 .. l-1``.

    Those of several models have these on another axis in front.
    """

    count_l: Array  # l
    forward_flop_l: Array
    backward_flop_l: Array
    parameter_bytes_l: Array
    trained_bytes_l: Array
    state_bytes_l: Array
    stash_bytes_l: Array
    cut_bytes_l: Array  # uncoded, over the cut behind block l-1; entry 0 leaves the embedding
    returns_l: Mask  # whether gradients come back over these cuts
    passing_bytes: Array  # of the block with most, ()

    def of(self, model: int) -> BlockTable:
        """Return the sums of one of several models."""
        return BlockTable(**{f.name: getattr(self, f.name)[model] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTable:
    """What every cluster's embedding, or its decoder, costs per example; as `BlockCost`, (M,)."""

    forward_flop: Array
    backward_flop: Array
    parameter_bytes: Array
    trained_bytes: Array
    state_bytes: Array
    stash_bytes: Array
    passing_bytes: Array
    piece_stash_bytes: Array
    piece_bytes: Array

    def of(self, clusters: Ints | int) -> EndTable:
        """Return the costs in these clusters."""
        return EndTable(**{f.name: getattr(self, f.name)[clusters] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTable:
    """Members of every cluster, padded to the largest cluster; ``present_mi`` masks."""

    present_mi: Mask
    speed_mi: Array
    overhead_mi: Array
    round_mi: Array
    memory_mi: Array
    energy_per_flop_mi: Array
    power_max_mi: Array
    budget_mi: Array
    first_mi: Ints  # the first block that it may hold
    guarded: bool  # whether any must leave out the first blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTable:
    """The edge of every cluster, (M,), and how many clusters it has."""

    speed_m: Array
    overhead_m: Array
    power_m: Array  # W
    energy_per_flop_m: Array  # 0 unless it is a device; a control unit's is in the member table
    memory_m: Array  # bytes, of each of its clusters
    clusters_m: Array
    own_m: Mask  # whether it differs from the snapshot's
    home_m: Mask  # whether it is the control unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Everything that prices a plan, as arrays."""

    snapshot: Snapshot
    models: tuple[ModelProfile, ...]  # that clusters train
    model_m: Ints  # the place of each cluster's among these
    blocks: BlockTable  # of these models
    embeddings: EndTable
    decoders: EndTable
    members: MemberTable
    edges: EdgeTable
    gain_mij: Array  # (M, I, I + 1): the last receiver is the edge
    d2d_hz_mij: Array  # like gain_mij; to the edge only where that is the control unit
    codec_mij: Ints  # like gain_mij: the link's place in ``core.links.CODECS``
    share_mij: Array  # like gain_mij: of its promised rate, what the link reaches
    server_rate_m: Array  # slower than the link's, to include what a round takes besides
    examples_m: Array
    most_share_m: Array  # of the whole model's training memory, on any one device

    @property
    def num_clusters(self) -> int:
        return int(self.examples_m.shape[0])

    @property
    def few(self) -> bool:
        """Whether there is time to replay all candidates."""
        return self.num_clusters <= FEW_CLUSTERS

    @property
    def num_blocks(self) -> int:
        """Encoder blocks of the model."""
        return len(self.snapshot.model.blocks)

    @property
    def ends(self) -> tuple[EndTable, EndTable]:
        """Embeddings and decoders."""
        return self.embeddings, self.decoders

    def list_names(self, clusters: Iterable[int]) -> list[str]:
        """Return the ids of the clusters with these indices."""
        return [self.snapshot.clusters[m].profile.cluster_id for m in clusters]

    @property
    def edge(self) -> int:
        """Index of the edge on the receiver axis of ``gain_mij``."""
        return int(self.gain_mij.shape[2]) - 1


def tabulate(snapshot: Snapshot, codec: str = "fp32") -> Tables:
    """Tabulate ``snapshot``; raises ScheduleError for a number that no plan can use.

    All links use ``codec``, except in clusters whose profile names another one.
    """
    _check(snapshot)
    clusters = snapshot.clusters
    members = _tabulate_members(clusters)
    _check_members(clusters, members)
    codecs = [find_codec(c.profile.link_codec or codec) for c in clusters]
    gains = [(c.channel.d2d_gain, c.channel.edge_gain) for c in clusters]
    shares = [None if c.links is None else (c.links.d2d, c.links.edge) for c in clusters]
    d2d_hz = _tabulate_d2d(clusters)
    models, model_m = _list_models(snapshot)
    blocks = stack_blocks(models)
    embeddings = _tabulate_ends([model.embedding for model in models], model_m)
    decoders = _tabulate_ends([model.decoder for model in models], model_m)
    return Tables(
        snapshot=snapshot,
        models=models,
        model_m=model_m,
        blocks=blocks,
        embeddings=embeddings,
        decoders=decoders,
        members=members,
        edges=_tabulate_edges(snapshot),
        gain_mij=np.maximum(_tabulate_links(gains, d2d_hz.shape, TINY_GAIN), TINY_GAIN),
        d2d_hz_mij=d2d_hz,
        codec_mij=np.tile(np.array(codecs, np.int64)[:, None, None], (1, *d2d_hz.shape[1:])),
        share_mij=_tabulate_links(shares, d2d_hz.shape, 1.0),
        server_rate_m=_compute_server_rates(
            snapshot,
            embeddings.parameter_bytes + blocks.parameter_bytes_l[model_m, -1],
            decoders.parameter_bytes,
        ),
        examples_m=np.array([c.profile.examples for c in clusters], dtype=np.float64),
        most_share_m=np.full(len(clusters), np.inf),
    )


def _list_models(snapshot: Snapshot) -> tuple[tuple[ModelProfile, ...], Ints]:
    """List the models that clusters train, and the place of each cluster's, (M,)."""
    trained = [snapshot.find_model(cluster.profile) for cluster in snapshot.clusters]
    places = {id(model): model for model in trained}
    order = {found: place for place, found in enumerate(places)}
    return tuple(places.values()), np.array([order[id(model)] for model in trained], np.int64)


def _tabulate_ends(costs: Sequence[BlockCost], model_m: Ints) -> EndTable:
    columns = {f.name: [float(getattr(c, f.name)) for c in costs] for f in fields(EndTable)}
    return EndTable(**{name: np.array(column)[model_m] for name, column in columns.items()})


def _tabulate_edges(snapshot: Snapshot) -> EdgeTable:
    profiles = [cluster.profile for cluster in snapshot.clusters]
    edges = [snapshot.find_edge(profile) for profile in profiles]
    owned = [profile.edge is not None for profile in profiles]
    places = [(own, edge.name) for own, edge in zip(owned, edges, strict=True)]
    count = Counter(places)
    sharing = [count[place] for place in places]

    def column(values: Iterable[float]) -> Array:
        return np.array(list(values), dtype=np.float64)

    return EdgeTable(
        speed_m=column(edge.speed_flop_per_s for edge in edges),
        overhead_m=column(edge.overhead_s for edge in edges),
        power_m=column(edge.tx_power_w for edge in edges),
        energy_per_flop_m=column(
            edge.energy_per_flop_j if profile.edge_device else 0.0
            for profile, edge in zip(profiles, edges, strict=True)
        ),
        memory_m=column(edge.memory_bytes for edge in edges) / column(sharing),
        clusters_m=column(sharing),
        own_m=np.array(owned, dtype=np.bool_),
        home_m=np.array([profile.edge_at_home for profile in profiles], dtype=np.bool_),
    )


def compute_round_trip_bit_per_s(profile: ClusterProfile) -> float:
    """Return the rate of a model from the server and of its update, which may be coded, back."""
    return 2.0 * profile.server_rate_bit_per_s / (1.0 + WIRE_SHARE[profile.update_codec])


def _compute_server_rates(snapshot: Snapshot, whole_m: Array, decoder_m: Array) -> Array:
    """Compute the rates that make embedding and blocks take as long as all that a round sends.

    Besides these a round takes its overhead and, with real machines, the decoder's weights. A
    simulated edge stands beside the server, as in the paper, unless it is the control unit.
    """
    profiles = [c.profile for c in snapshot.clusters]
    rate = np.array(
        [compute_round_trip_bit_per_s(profile) for profile in profiles], dtype=np.float64
    )
    overhead = np.array([profile.overhead_s for profile in profiles], dtype=np.float64)
    apart = [profile.real_links or profile.edge_at_home for profile in profiles]
    far = np.array(apart, dtype=np.float64)
    more_bits = overhead * rate + far * 16.0 * decoder_m
    return np.asarray(rate / (1.0 + more_bits / np.maximum(16.0 * whole_m, 1.0)))


def stack_blocks(models: Sequence[ModelProfile]) -> BlockTable:
    """Tabulate prefix sums over the blocks of several models."""
    tables = [tabulate_blocks(model) for model in models]
    names = [f.name for f in fields(BlockTable)]
    return BlockTable(**{name: np.stack([getattr(t, name) for t in tables]) for name in names})


def tabulate_blocks(model: ModelProfile) -> BlockTable:
    """Tabulate prefix sums over the blocks of ``model``."""

    def prefix(cost: str) -> Array:
        values = [float(getattr(block, cost)) for block in model.blocks]
        return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])

    cuts = [model.embedding.output_bytes, *(block.output_bytes for block in model.blocks)]
    return BlockTable(
        count_l=np.arange(len(model.blocks) + 1, dtype=np.float64),
        forward_flop_l=prefix("forward_flop"),
        backward_flop_l=prefix("backward_flop"),
        parameter_bytes_l=prefix("parameter_bytes"),
        trained_bytes_l=prefix("trained_bytes"),
        state_bytes_l=prefix("state_bytes"),
        stash_bytes_l=prefix("stash_bytes"),
        cut_bytes_l=np.array(cuts, dtype=np.float64),
        returns_l=np.array([part.returns for part in (model.embedding, *model.blocks)]),
        passing_bytes=np.array(max(block.passing_bytes for block in model.blocks)),
    )


def _tabulate_members(clusters: tuple[ClusterSnapshot, ...]) -> MemberTable:
    rows = [c.profile.members for c in clusters]
    width = max(len(row) for row in rows)

    def column(name: str, padding: float) -> Array:
        table = np.full((len(rows), width), padding)
        for m, row in enumerate(rows):
            table[m, : len(row)] = [float(getattr(member, name)) for member in row]
        return table

    kept_m = np.array([c.profile.trusted_blocks for c in clusters], dtype=np.int64)
    first_mi = np.where(column("trusted", 1.0) > 0.0, 0, kept_m[:, None])
    return MemberTable(
        present_mi=np.array([[i < len(row) for i in range(width)] for row in rows]),
        speed_mi=column("speed_flop_per_s", 1.0),
        overhead_mi=column("overhead_s", 0.0),
        round_mi=column("round_s", 0.0),
        memory_mi=column("memory_bytes", 0.0),
        energy_per_flop_mi=column("energy_per_flop_j", 0.0),
        power_max_mi=column("tx_power_max_w", 1.0),
        budget_mi=column("energy_budget_j", math.inf),
        first_mi=first_mi,
        guarded=bool(first_mi[:, 1:].any()),
    )


def _tabulate_links(given: Sequence[_Ends | None], shape: tuple[int, ...], absent: float) -> Array:
    """Tabulate a value of every link, (M, I, I + 1): as given between members and to the edge."""
    table = np.full(shape, absent)
    for m, ends in enumerate(given):
        if ends is not None:
            between, edge = ends
            table[m, : len(edge), : len(edge)] = between
            table[m, : len(edge), -1] = edge
    return table


def _tabulate_d2d(clusters: tuple[ClusterSnapshot, ...]) -> Array:
    """Tabulate the bandwidth between any two members, the narrower of both radios, (M, I, I + 1).

    The last receiver is the edge, where that is the control unit.
    """
    width = max(len(c.profile.devices) + 1 for c in clusters)
    shared = np.array([c.profile.d2d_bandwidth_hz for c in clusters], dtype=np.float64)
    widest = np.repeat(shared[:, None], width + 1, axis=1)
    for m, cluster in enumerate(clusters):
        for i, member in enumerate(cluster.profile.members):
            if member.d2d_bandwidth_hz is not None:
                widest[m, i] = min(member.d2d_bandwidth_hz, shared[m])
        if cluster.profile.edge_at_home:
            widest[m, -1] = widest[m, 0]
    return np.minimum(widest[:, :-1, None], widest[:, None, :])


def _check(snapshot: Snapshot) -> None:
    radio, edge = snapshot.radio, snapshot.edge
    if not snapshot.clusters:
        raise ScheduleError("no cluster is connected: nothing can be planned; start a cluster")
    _check_distinct("cluster ids", [c.profile.cluster_id for c in snapshot.clusters])
    _check_positive("the radio's", radio, "bandwidth_hz", "noise_w_per_hz")
    _check_edge("the edge's", edge)
    for model in (snapshot.model, *snapshot.models.values()):
        _check_model(model)
    for cluster in snapshot.clusters:
        _check_cluster(f"cluster {cluster.profile.cluster_id!r}", cluster)


def _check_model(model: ModelProfile) -> None:
    if not model.blocks:
        raise ScheduleError("the model has no encoder blocks: choose a model with at least one")
    blocks = {f"block {index}": block for index, block in enumerate(model.blocks)}
    for name, cost in {"embedding": model.embedding, "decoder": model.decoder, **blocks}.items():
        for field in (
            "forward_flop",
            "backward_flop",
            "stash_bytes",
            "output_bytes",
            "passing_bytes",
        ):
            _check_not_negative(f"{name}: {field}", getattr(cost, field))


def _check_cluster(where: str, cluster: ClusterSnapshot) -> None:
    profile, members = cluster.profile, cluster.profile.members
    if not profile.devices:
        raise ScheduleError(
            f"{where} has no devices: connect at least one besides its control unit"
        )
    _check_distinct(f"{where}: device ids", [member.device_id for member in members])
    _check_positive(f"{where}:", profile, "examples", "d2d_bandwidth_hz", "server_rate_bit_per_s")
    _check_not_negative(f"{where}: overhead_s", profile.overhead_s)
    if profile.edge is not None:
        _check_edge(f"{where}: its edge's", profile.edge)
    _check_channel(where, cluster, len(members))


def _check_edge(where: str, edge: EdgeProfile) -> None:
    _check_positive(where, edge, "speed_flop_per_s", "tx_power_w")
    _check_not_negative(f"{where} overhead_s", edge.overhead_s)


def _check_members(clusters: Sequence[ClusterSnapshot], members: MemberTable) -> None:
    """Check all members at once, of which there may be thousands."""
    own = [[member.d2d_bandwidth_hz for member in c.profile.members] for c in clusters]
    hz = np.ones(members.speed_mi.shape)
    for m, row in enumerate(own):
        hz[m, : len(row)] = [1.0 if value is None else value for value in row]
    positive = {
        "speed_flop_per_s": members.speed_mi,
        "tx_power_max_w": members.power_max_mi,
        "d2d_bandwidth_hz": hz,
    }
    others = {
        "energy_per_flop_j": members.energy_per_flop_mi,
        "overhead_s": members.overhead_mi,
        "round_s": members.round_mi,
    }
    checks = [(n, v, (v > 0) & np.isfinite(v), "finite and > 0") for n, v in positive.items()]
    checks += [(n, v, (v >= 0) & np.isfinite(v), "finite and >= 0") for n, v in others.items()]
    budget = members.budget_mi
    checks.append(("energy_budget_j", budget, budget > 0, "> 0"))
    for name, value, sound, rule in checks:
        if not sound.all():
            m, i = np.argwhere(~sound)[0].tolist()
            profile = clusters[m].profile
            raise ScheduleError(
                f"cluster {profile.cluster_id!r}, device {profile.members[i].device_id!r}: "
                f"{name} must be {rule}, got {value[m, i]}"
            )


def _check_channel(where: str, cluster: ClusterSnapshot, members: int) -> None:
    d2d = np.asarray(cluster.channel.d2d_gain, dtype=np.float64)
    edge = np.asarray(cluster.channel.edge_gain, dtype=np.float64)
    if d2d.shape != (members, members) or edge.shape != (members,):
        raise ScheduleError(
            f"{where}: channel gains have shapes {d2d.shape} and {edge.shape}, "
            f"expected ({members}, {members}) and ({members},)"
        )
    np.fill_diagonal(d2d := d2d.copy(), 0.0)  # a device's gain to itself means nothing
    for ends, gains in (("between devices", d2d), ("to the edge", edge)):
        if not (gains.min() >= 0.0 and gains.max() < math.inf):
            raise ScheduleError(f"{where}: channel gains {ends} must be finite and >= 0")


def _check_distinct(what: str, ids: list[str]) -> None:
    if len(set(ids)) != len(ids):
        raise ScheduleError(f"{what} must differ, got {ids}: rename one")


def _check_not_negative(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ScheduleError(f"{what} must be finite and >= 0, got {value}")


def _check_positive(whose: str, profile: object, *fields: str) -> None:
    for field in fields:
        value = getattr(profile, field)
        if not (math.isfinite(value) and value > 0):
            raise ScheduleError(f"{whose} {field} must be finite and > 0, got {value}")
