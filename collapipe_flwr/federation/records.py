"""Flower's records and messages: the only place that spells their keys.

A message to a cluster has its :class:`TaskAssignment` inside the ConfigRecord of the inner
strategy (built-in mods demand exactly one), a key for each field. A reply has one ArrayRecord, one
MetricRecord (Flower averages everything in it) and the :class:`ClusterMeasurement` in a
ConfigRecord, which is removed before the inner strategy aggregates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast, get_type_hints

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.domain import ClusterPlan, ClusterProfile
from collapipe_flwr.core.errors import ConfigError, ProtocolError, ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.measurements import ClusterMeasurement
from collapipe_flwr.core.texts import make_printable, to_one_line
from collapipe_flwr.federation.accepted import Progress
from collapipe_flwr.federation.arrays import inner_view, load_into, narrow_raw
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.scheduler.plans import check_cluster_plan

ARRAYS = "arrays"
METRICS = "metrics"
CONFIG = "config"
EXAMPLES = "num-examples"
QUERY_DESCRIBE = "query.describe"

_FLOWER_ROUND = "server-round"  # as Flower's strategies spell it
_PROXIMAL = "proximal-mu"  # as FedProx does
_RATES = ("lr", "learning-rate")  # as Flower's examples do
_ROUND, _BUNDLES = "collapipe.server-round", "collapipe.bundles"
_UNSPLIT = "collapipe.unsplit"
_VOCABULARY = "collapipe.vocabulary"
_TELEMETRY = "collapipe.telemetry"
_PROFILE = "collapipe.profile"
_SPARE = "collapipe.spare"
TALLY = "tally."  # before the name of a task's metric
_JSON = "json"
_MOST_INTEGER = 2**1000
_MOST_CHARACTERS = 2**25  # of telemetry, timelines included

BAD_REPLY = 300  # Error.code of replies that arrived but cannot be used; Flower's own are below 100
LATE = 301  # Error.code of replies that were not waited for
LONGEST_SENTENCE = 400  # characters of a client's error message
_FLOWER_WRAPPING = re.compile(r"\A.*occurred\. Message: ?|^<class '[^']*'>:<'|'>\s*$", re.DOTALL)
NO_SECURE_AGGREGATION = (
    "its ClientApp asks for secure aggregation, which Flower has for its legacy ServerApp only: "
    "leave out secaggplus_mod; Flower's differential privacy works (SECURITY.md)"
)

SHORT = BatchShape(source_length=1, target_length=1)  # by default

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTask:
    """What a cluster needs to train the model.

    Clusters that name no edge use that of the run (``edge_address``, empty if it names none, too),
    simulated ones else the ``simulated_edge`` in the server's process.
    """

    model_spec_json: str
    edge_address: str
    simulated_edge: str = ""
    learning: LearningSettings
    shape: BatchShape = SHORT  # of the training data
    products: bool = False  # adapters are factored anew in every round

    @property
    def run_id(self) -> str:
        return self.learning.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsplitTask:
    """The unsplit model, which clients train by their run-config: the peer of every comparison."""

    model_spec_json: str
    run_id: str = ""  # the same for a run that is resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAssignment:
    """A cluster's order for one round; ``split`` is None where clients train whole models."""

    server_round: int
    cluster_id: str | None = None
    plan: ClusterPlan | None = None
    split: SplitTask | None = None
    bundles: bool = False  # the cluster accepts bundled arrays, see ClusterProfile
    attempt: int = 0  # of the orders for this round
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        """Raise ProtocolError for a plan that cannot be carried out."""
        try:
            if self.plan is not None:
                check_cluster_plan(self.plan)
        except ScheduleError as error:
            raise ProtocolError(f"{_key('plan')}: {error}") from error


_KINDS: Mapping[str, Any] = get_type_hints(TaskAssignment)


def write_assignment(content: RecordDict, assignment: TaskAssignment) -> RecordDict:
    """Copy ``content`` with the assignment in its first ConfigRecord."""
    name, config = next(iter(content.config_records.items()), (CONFIG, ConfigRecord()))
    given = {f.name: getattr(assignment, f.name) for f in fields(assignment)}
    values = {_key(field): to_json(value) for field, value in given.items() if value is not None}
    return RecordDict({**content, name: ConfigRecord({**config, **values})})


def read_assignment(content: RecordDict) -> TaskAssignment:
    """Read the assignment in a message; raises ProtocolError if it is missing or malformed."""
    config = _find_holder(content, _ROUND)
    if config is None:
        raise ProtocolError(
            f"the message holds no {_ROUND}: wrap the server's strategy in CollaPipe"
        )
    texts = {name: _read_text(config, _key(name)) for name in _KINDS}
    return TaskAssignment(
        **{n: from_json(_KINDS[n], t, _key(n)) for n, t in texts.items() if t is not None}
    )


def read_split_task(content: RecordDict) -> SplitTask | None:
    """Read the task in a message, if any; raises ProtocolError if it is malformed."""
    text = _find_text(content, _key("split"))
    return None if text is None else from_json(SplitTask, text, _key("split"))


def takes_bundles(content: RecordDict) -> bool:
    """Return whether the receiver of this message accepts bundled arrays."""
    return _find_text(content, _BUNDLES) == "true"


def write_telemetry(content: RecordDict, telemetry: ClusterMeasurement) -> RecordDict:
    """Copy ``content`` with the telemetry as a record of its own."""
    return RecordDict({**content, _TELEMETRY: ConfigRecord({_JSON: to_json(telemetry)})})


def take_telemetry(content: RecordDict) -> tuple[RecordDict, ClusterMeasurement | None]:
    """Split ``content`` into the rest and its telemetry; raises ProtocolError if malformed."""
    rest = RecordDict({k: v for k, v in content.items() if k != _TELEMETRY})
    return rest, _read(content, _TELEMETRY, ClusterMeasurement)


def task_config(vocabulary_json: str, unsplit: UnsplitTask | None) -> ConfigRecord:
    """Make our ServerApp's config for all clients: the vocabulary, and the unsplit task if any.

    ``unsplit`` is for a plain Flower strategy; split models are in the :class:`TaskAssignment`.
    """
    config = ConfigRecord({_VOCABULARY: vocabulary_json})
    if unsplit is not None:
        config[_UNSPLIT] = to_json(unsplit)
    return config


def read_vocabulary(content: RecordDict) -> str:
    """Read the vocabulary in a message of our ServerApp; raises ProtocolError without one."""
    text = _find_text(content, _VOCABULARY)
    if text is None:
        raise ProtocolError(
            f"the message holds no {_VOCABULARY}: use this ClientApp with the ServerApp beside it, "
            "or write your own with collapipe_flwr.Cluster"
        )
    return text


def run_id_of(content: RecordDict) -> str:
    """Read the id of the run in an order; raises ProtocolError if it is malformed."""
    task = read_unsplit_task(content) or read_assignment(content).split
    return task.run_id if task else ""


def flower_round(content: RecordDict) -> int:
    """Read the server round in a plain strategy's message; raises ProtocolError without one."""
    config = _find_holder(content, _FLOWER_ROUND)
    server_round = None if config is None else config[_FLOWER_ROUND]
    if type(server_round) is not int:
        raise ProtocolError(f"{_FLOWER_ROUND} must be a whole number, got {server_round!r}")
    return server_round


def read_unsplit_task(content: RecordDict) -> UnsplitTask | None:
    """Read the task in a plain strategy's message, if any; raises ProtocolError if malformed."""
    text = _find_text(content, _UNSPLIT)
    return None if text is None else from_json(UnsplitTask, text, _UNSPLIT)


def asked_optimizer(content: RecordDict, optimizer: OptimizerConfig) -> OptimizerConfig:
    """Change ``optimizer`` by the settings in the inner strategy's config.

    ``proximal-mu`` (FedProx) is the weight of the proximal term, ``lr`` or ``learning-rate`` the
    learning rate. Raises ConfigError for invalid values.
    """
    mu = _read_number(content, _PROXIMAL)
    if mu is not None:
        optimizer = replace(optimizer, proximal_mu=mu)
    rate = next((r for r in (_read_number(content, key) for key in _RATES) if r is not None), None)
    return optimizer if rate is None else optimizer.with_learning_rate(rate)


def write_profile(profile: ClusterProfile) -> RecordDict:
    return RecordDict({_PROFILE: ConfigRecord({_JSON: to_json(profile)})})


def write_spare() -> RecordDict:
    """Make the answer of a node beyond the run's clusters."""
    return RecordDict({_SPARE: ConfigRecord()})


def read_profile(content: RecordDict) -> ClusterProfile | None:
    """Read the description in an answer, None for a spare node; raises ProtocolError."""
    profile = _read(content, _PROFILE, ClusterProfile)
    if profile is None and _SPARE in content:
        return None
    if profile is None:
        raise ProtocolError(f"the answer holds no {_PROFILE} record")
    return profile


def read_tally(metrics: MetricRecord) -> dict[str, list[float]]:
    """Read the counts in a MetricRecord; raises ProtocolError if one of them is no list."""
    found = {k.removeprefix(TALLY): v for k, v in metrics.items() if k.startswith(TALLY)}
    if odd := [name for name, counts in found.items() if not isinstance(counts, list)]:
        raise ProtocolError(f"{TALLY}{odd[0]} must be a list of numbers")
    return {name: [float(c) for c in cast(list[float], v)] for name, v in found.items()}


def examples_of(content: RecordDict, weighted_by: str) -> float:
    """Return the weight of a reply in averages; 0 where it names none."""
    metrics: MetricRecord = next(iter(content.metric_records.values()), MetricRecord())
    weight = metrics.get(weighted_by, 0)
    if isinstance(weight, list):
        return 0.0
    return math.inf if weight > _MOST_INTEGER else float(weight)  # float() refuses huge integers


def content_bytes(content: RecordDict) -> int:
    """Count the bytes of a message's records, without Flower's framing."""
    return sum(
        array_bytes(r) if isinstance(r, ArrayRecord) else sum(_value_bytes(v) for v in r.values())
        for r in content.values()
    )


def array_bytes(arrays: ArrayRecord) -> int:
    """Count the bytes of the arrays as they travel."""
    return sum(len(array.data) for array in arrays.values())


def _value_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(_value_bytes(v) for v in value)
    return len(value) if isinstance(value, str | bytes) else 8


def _key(name: str) -> str:
    """Return the key of an assignment's field."""
    return f"collapipe.{name.replace('_', '-')}"


def _find_holder(content: RecordDict, key: str) -> ConfigRecord | None:
    """Find the first ConfigRecord that has the key."""
    return next((c for c in content.config_records.values() if key in c), None)


def _find_text(content: RecordDict, key: str) -> str | None:
    """Read the string under a key of the first ConfigRecord that has it."""
    config = _find_holder(content, key)
    return None if config is None else _read_text(config, key)


def _read_number(content: RecordDict, key: str) -> float | None:
    """Read a number >= 0 from a config, if it has one; raises ConfigError for other values."""
    config = _find_holder(content, key)
    value = None if config is None else config[key]
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= cast(float, value) < math.inf:
        raise ConfigError(f"the strategy's config sets {key} to {value!r}: set a number >= 0")
    return float(cast(float, value))


def _read(content: RecordDict, name: str, kind: type[T]) -> T | None:
    record = content.get(name)
    if record is None:
        return None
    text = _read_text(record, _JSON) if isinstance(record, ConfigRecord) else None
    if text is None:
        raise ProtocolError(f"{name} must be a ConfigRecord with the key {_JSON!r}")
    return from_json(kind, text, name, most=_MOST_CHARACTERS)


def _read_text(config: ConfigRecord, key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise ProtocolError(f"{key} must be a string, got {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A training message as it was sent."""

    node_id: int
    cluster_id: str
    message: Message
    content_bytes: int
    arrays: ArrayRecord = field(default_factory=ArrayRecord)  # of a model to split
    updates: str = "fp32"  # the codec of the reply


def sender_of(reply: Message, sent: Sequence[Sent]) -> Sent | None:
    """Find the message that a reply answers, by its id, else by node.

    Flower answers for a lost node as node 1.
    """
    asked = reply.metadata.reply_to_message_id
    by_id = (s for s in sent if asked and s.message.metadata.message_id == asked)
    by_node = (s for s in sent if s.node_id == reply.metadata.src_node_id)
    return next(by_id, None) or next(by_node, None)


def error_text(error: Error) -> str:
    """Return a client's error message without Flower's wrapping, on one line of bounded length."""
    reason = make_printable(error.reason or f"error {error.code} without a reason")
    if RECORD_KEY_CONFIGS in reason:
        return NO_SECURE_AGGREGATION
    return to_one_line(_FLOWER_WRAPPING.sub("", reason), LONGEST_SENTENCE)


def with_printable_error(reply: Message) -> Message:
    """Copy an error reply so that it may be logged, whatever the client wrote into it."""
    changed = copy(reply)
    changed.error = Error(reply.error.code, make_printable(reply.error.reason or ""))
    return changed


def as_failed(reply: Message, error: Exception) -> Message:
    """Replace a reply by the error, in Flower's words: every strategy counts a failure."""
    found = Error(BAD_REPLY, f"{type(error)}:<'{error}'>")
    return Message(error=found, metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


def with_content(reply: Message, content: RecordDict) -> Message:
    """Copy the reply with other content."""
    changed = copy(reply)
    changed.content = content
    return changed


def only_arrays(content: RecordDict, what: str, advice: str = "") -> tuple[str, ArrayRecord]:
    """Return the name and the arrays of the only ArrayRecord; raises ProtocolError."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise ProtocolError(f"{what} must hold exactly one ArrayRecord, got {len(found)}{advice}")
    return found[0]


def hide_arrays(content: RecordDict, hidden: Collection[str]) -> RecordDict:
    """Copy ``content`` with only those arrays that the inner strategy sees."""
    shown = RecordDict(dict(content))
    for name, record in content.array_records.items():
        shown[name] = inner_view(record, hidden).copy()
    return shown


def restore_arrays(
    content: RecordDict, template: ArrayRecord, hidden: Collection[str], *, exact: bool
) -> RecordDict:
    """Copy all records, with a view of the global model replaced by the model itself.

    Every array has its own dtype if ``exact``, else only those that numpy lacks.
    """
    shown = set(template).difference(hidden)
    own = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord) and set(record) == shown:
            record = load_into(template, record) if exact else narrow_raw(record, template)
        own[name] = record.copy()
    return own


def replace_content(message: Message, content: RecordDict) -> Message:
    """Make the same message with other content.

    Both share their metadata: the id that Flower assigns to the sent message appears in the inner
    strategy's as well.
    """
    return Message(content, metadata=message.metadata)  # type: ignore[call-overload, no-any-return]


def with_weight(content: RecordDict, weighted_by: str, weight: float) -> RecordDict:
    """Copy ``content`` with another weight in averages."""
    changed = RecordDict(dict(content))
    for name, metrics in content.metric_records.items():
        if weighted_by in metrics:
            changed[name] = MetricRecord({**metrics, weighted_by: weight})
    return changed
