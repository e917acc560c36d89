"""The border: what clusters reply is checked here, before anything else of the server uses it.

A member may send anything. What it sends is decoded by types that declare their bounds
(`core.bounds`), arrays by their heads (`array_format`), and here compared with what it was asked
for and with what the others reply. All of this raises ProtocolError and nothing else, so that a
cluster that sends nonsense fails in its round, and the others go on as if it were absent.

The number of examples weighs a reply in averages. It is the cluster's own claim, as in every Flower
project: only impossible numbers are refused.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy

from collapipe_flwr.core.domain import ClusterPlan, ClusterProfile
from collapipe_flwr.core.errors import ProtocolError, ScheduleError
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.core.texts import SHORT, to_one_line
from collapipe_flwr.federation import records
from collapipe_flwr.federation.array_format import layout_of
from collapipe_flwr.federation.inner import layers
from collapipe_flwr.federation.records import Sent, examples_of
from collapipe_flwr.federation.updates import EXACT, decode_update
from collapipe_flwr.scheduler.plans import check_cluster_plan, dry_run_plan

log = logging.getLogger("flwr.collapipe")
MOST_EXAMPLES = 1e12  # of one cluster in one round, tokens included
MOST_METRIC = 1e30  # of any metric: far below what overflows in a weighted sum
MOST_ENTRIES = 2**20  # of one metric
_MOST_RECORDS = 64  # of one reply
_MOST_NAME = 1000  # characters of an array's or a metric's name


def trained(
    content: RecordDict, sent: Sent, plan: ClusterPlan | None, weighted_by: str
) -> tuple[RecordDict, ClusterMeasurement | None]:
    """Check a reply to training, decode it and split off its telemetry; raises ProtocolError.

    ``plan`` is the one that was sent. The weight of the reply is checked elsewhere.
    """
    cluster_id = sent.cluster_id
    _check_records(content, cluster_id, weighted_by)
    try:
        rest, telemetry = records.take_telemetry(content)
        if sent.updates != EXACT:
            name, arrays = records.only_arrays(rest, "a reply")
            rest[name] = decode_update(arrays, sent.arrays, sent.updates)
        for arrays in rest.array_records.values():
            for key, array in arrays.items():
                layout_of(key, array)
    except ProtocolError as error:
        raise ProtocolError(f"cluster {cluster_id}: {error}") from error
    if telemetry is not None:
        _check_telemetry(telemetry, plan, cluster_id)
    return rest, telemetry


def described(content: RecordDict) -> ClusterProfile | None:
    """Read the cluster in an answer; None for a spare node. Raises ProtocolError."""
    profile = records.read_profile(content)
    if profile is not None:
        _check_profile(profile)
    return profile


def _check_records(content: RecordDict, cluster_id: str, weighted_by: str) -> None:
    if len(content) > _MOST_RECORDS:
        raise ProtocolError(f"cluster {cluster_id} replied with {len(content)} records")
    for name, record in content.items():
        for key in (name, *record):
            if not key.isprintable() or len(key) > _MOST_NAME:
                raise ProtocolError(
                    f"cluster {cluster_id} replied with the name {to_one_line(key, SHORT)!r}: "
                    f"names must be one line of at most {_MOST_NAME} printable characters"
                )
        if isinstance(record, MetricRecord):
            _check_metrics(record, cluster_id, weighted_by)


def _check_metrics(metrics: MetricRecord, cluster_id: str, weighted_by: str) -> None:
    for key, value in ((k, v) for k, v in metrics.items() if k != weighted_by):
        values = value if isinstance(value, list) else (value,)
        if len(values) > MOST_ENTRIES:
            raise ProtocolError(f"cluster {cluster_id} replied with {len(values)} numbers as {key}")
        if odd := [v for v in values if not abs(v) <= MOST_METRIC]:
            shown = f"{odd[0]:g}" if isinstance(odd[0], float) else "a huge number"
            raise ProtocolError(
                f"cluster {cluster_id} replied with {key} = {shown}, which would spoil every mean"
            )


def _check_telemetry(
    telemetry: ClusterMeasurement, plan: ClusterPlan | None, cluster_id: str
) -> None:
    if others := telemetry.cluster_ids - {cluster_id}:
        raise ProtocolError(f"cluster {cluster_id} sent telemetry of {min(others)!r}")
    names = [report.name for report in telemetry.stages]
    if len(set(names)) < len(names):
        raise ProtocolError(f"cluster {cluster_id} sent two reports of one stage")
    if telemetry.replanned is not None:
        _check_replanned(telemetry.replanned, plan, cluster_id)
    if telemetry.profile is not None:
        _check_profile(telemetry.profile)


def _check_profile(profile: ClusterProfile) -> None:
    """Raise ProtocolError for devices that cannot be told apart, or that no plan could use."""
    ids = [member.device_id for member in profile.members]
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise ProtocolError(f"cluster {profile.cluster_id} describes two devices as {twice[0]!r}")
    edges = [edge.id for edge in profile.edges]
    if profile.other_edges and ("" in edges or len({*edges, *ids}) < len(edges) + len(ids)):
        raise ProtocolError(
            f"cluster {profile.cluster_id} describes several edges, but not by distinct names"
        )
    if not profile.can_train:
        raise ProtocolError(f"cluster {profile.cluster_id} describes no device")


def _check_replanned(last: ClusterPlan, begun: ClusterPlan | None, cluster_id: str) -> None:
    """Raise ProtocolError for a plan that cannot be what is left of the one that was sent."""
    where = f"the last plan of cluster {cluster_id}"
    if begun is None:
        raise ProtocolError(f"{where} follows none: it was sent without a plan")
    try:
        check_cluster_plan(last, begun.segments[-1].stop_block)
    except ScheduleError as error:
        raise ProtocolError(f"{where}: {to_one_line(str(error))}") from error
    for name in ("micro_batch_size", "micro_batches", "local_steps", "execution"):
        if getattr(last, name) != getattr(begun, name):
            raise ProtocolError(f"{where} has another {name} than it was sent")
    try:
        dry_run_plan(last)
    except ScheduleError as error:
        raise ProtocolError(f"{where}: {to_one_line(str(error))}") from error
    devices, control_unit = (
        set(last.device_ids),
        set(begun.tx_power_w) - set(begun.gradient_power_w),
    )
    powers = (last.tx_power_w.keys() - control_unit, last.gradient_power_w.keys())
    if any(found != devices for found in powers) or not control_unit <= last.tx_power_w.keys():
        raise ProtocolError(f"{where} must have powers of each of its devices, and of no other")
    if not devices <= last.memory_bytes.keys() <= devices | control_unit:
        raise ProtocolError(f"{where} must have the memory of each of its devices, and no other")
    numbers = [last.latency_s, last.step_s, last.bandwidth_hz, last.memory_margin]
    for by_member in (last.tx_power_w, last.gradient_power_w, last.energy_j, last.memory_bytes):
        numbers += by_member.values()
    if not all(0 <= number <= MOST_METRIC for number in numbers):
        raise ProtocolError(f"{where} holds numbers that no round reaches")


Shape = frozenset[tuple[str, str, object]]
"""Record, name in it, and length or shape: what must be the same in replies that are averaged."""


def shape_of(content: RecordDict) -> Shape:
    found: set[tuple[str, str, object]] = set()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            found |= {(name, key, tuple(array.shape)) for key, array in record.items()}
        elif isinstance(record, MetricRecord):
            lists = {key: value for key, value in record.items() if isinstance(value, list)}
            found |= {(name, key, len(lists[key]) if key in lists else ()) for key in record}
    return frozenset(found)


def common_shape(contents: Iterable[RecordDict]) -> Shape | None:
    """Find the most frequent shape; of several, the first."""
    counted = Counter(map(shape_of, contents)).most_common(1)
    return counted[0][0] if counted else None


def check_shape(content: RecordDict, others: Shape, cluster_id: str) -> None:
    """Raise ProtocolError for a reply of another shape than that of ``others``."""
    own = shape_of(content)
    if own == others:
        return
    record, key, size = min(own ^ others, key=str)
    known = {entry[:2] for entry in own} & {entry[:2] for entry in others}
    how = "in another shape than" if (record, key) in known else "unlike"
    what = "with" if (record, key, size) in own or (record, key) in known else "without"
    name = to_one_line(f"{record}/{key}", SHORT)
    raise ProtocolError(
        f"cluster {cluster_id} replied {what} {name}, {how} the others: such replies have no mean"
    )


def evaluations(
    replies: Iterable[Message],
    names: Mapping[int, str],
    weighted_by: str,
    *,
    averages: bool,
    weighs: bool = False,
) -> list[Message]:
    """Check the replies to an evaluation; errors replace those that cannot be used.

    ``names`` are the clusters' by node. With ``averages`` they must have the same shape, if it
    ``weighs`` them each must have a weight.
    """
    check = check_weight if weighs else check_possible

    def checked(reply: Message, shape: Shape | None) -> Message:
        node = reply.metadata.src_node_id
        name = names.get(node, f"node-{node}")
        if reply.has_error():
            return records.with_printable_error(reply)
        try:
            _check_records(reply.content, name, weighted_by)
            check(reply.content, weighted_by, name)
            if shape is not None:
                check_shape(reply.content, shape, name)
        except ProtocolError as error:
            log.warning("the evaluation of cluster %s is unusable: %s", name, error)
            return records.as_failed(reply, error)
        return reply

    found = [checked(reply, None) for reply in replies]
    if not averages:
        return found
    shape = common_shape(reply.content for reply in found if reply.has_content())
    return [reply if reply.has_error() else checked(reply, shape) for reply in found]


def averages(strategy: Strategy) -> bool:
    """Whether a strategy averages replies, which then must have the same shape."""
    return any(isinstance(layer, FedAvg) for layer in layers(strategy))


def check_weight(content: RecordDict, weighted_by: str, cluster_id: str) -> float:
    """Return the weight of a reply; raises ProtocolError for one that would spoil the average."""
    examples = examples_of(content, weighted_by)
    if not (math.isfinite(examples) and examples > 0):
        raise ProtocolError(
            f"cluster {cluster_id} replied with {weighted_by} = {examples:g} or without it: it "
            "weighs the reply, so it must be > 0"
        )
    return check_possible(content, weighted_by, cluster_id)


def check_possible(content: RecordDict, weighted_by: str, cluster_id: str) -> float:
    """Return the weight of a reply; raises ProtocolError for more examples than are possible."""
    examples = examples_of(content, weighted_by)
    if not 0 <= examples <= MOST_EXAMPLES:
        raise ProtocolError(
            f"cluster {cluster_id} claims {weighted_by} = {examples:g}, which no round reaches: it "
            "would outweigh all others, so its reply is not used"
        )
    return examples


def explain_divergence(key: str) -> str:
    """Say why a reply with this non-finite array is refused."""
    return (
        f"it returned {key} with values that are not finite: its training diverged; lower the "
        "learning rate"
    )
