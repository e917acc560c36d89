"""What travels: typed values that survive the wire, and sentences for what does not fit."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.core.domain import (
    ClusterPlan,
    ClusterProfile,
    DeviceProfile,
    Segment,
)
from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.measurements import ClusterMeasurement, StageMeasurement
from collapipe_flwr.federation.records import (
    SplitTask,
    TaskAssignment,
    content_bytes,
    examples_of,
    read_assignment,
    read_profile,
    take_telemetry,
    write_assignment,
    write_profile,
    write_telemetry,
)
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.thorough import examples

PLAN = ClusterPlan(
    cluster_id="c1",
    segments=(
        Segment(device_id="d1", first_block=0, stop_block=3),
        Segment(device_id="d2", first_block=3, stop_block=4),
    ),
    micro_batch_size=8,
    micro_batches=4,
    warmup_depth=(4, 3, 2, 1),
    local_steps=7,
    bandwidth_hz=1.5e6,
    tx_power_w={"cu": 0.05, "d1": 0.1, "d2": 0.2},
    gradient_power_w={"d1": 0.1, "d2": 0.2},
    latency_s=3.25,
    step_s=0.4,
    energy_j={"cu": 0.5, "d1": 1.0, "d2": 2.0},
    memory_bytes={"cu": 5, "d1": 10, "d2": 20},
)
TASK = TaskAssignment(
    server_round=9,
    cluster_id="c1",
    plan=PLAN,
    split=SplitTask(
        model_spec_json='{"task": "seq2seq"}',
        edge_address="127.0.0.1:4711",
        learning=LearningSettings(optimizer=OptimizerConfig(), seed=3),
    ),
)
TELEMETRY = ClusterMeasurement(
    cluster_id="c1",
    examples=64,
    wall_s=2.5,
    losses=(3.5, math.inf),
    reports=(
        StageMeasurement(name="cu", steps=2),
        StageMeasurement(name="d1", steps=2, forward_s=0.1),
    ),
)
DEVICE = DeviceProfile(
    device_id="d1",
    kind="phone",
    speed_flop_per_s=1e9,
    memory_bytes=2**30,
    energy_per_flop_j=1e-10,
    tx_power_max_w=0.2,
    energy_budget_j=math.inf,
)
PROFILE = ClusterProfile(
    cluster_id="c1",
    examples=64,
    control_unit=DEVICE,
    devices=(DEVICE,),
    d2d_bandwidth_hz=1e6,
    server_rate_bit_per_s=1e8,
)


def message() -> RecordDict:
    return RecordDict({"my-config": ConfigRecord({"lr": 0.5}), "m": MetricRecord({"a": 1})})


@pytest.mark.parametrize("task", [TASK, TaskAssignment(server_round=1)])
def test_an_assignment_survives_the_wire_beside_the_users_own_settings(task, wire):
    content = wire(write_assignment(message(), task))
    assert read_assignment(content) == task
    assert content["my-config"]["lr"] == 0.5
    assert len(content.config_records) == 1


def test_writing_leaves_the_original_alone():
    original = message()
    write_assignment(original, TASK)
    write_telemetry(original, TELEMETRY)
    assert dict(original["my-config"]) == {"lr": 0.5}
    assert set(original) == {"my-config", "m"}


def test_a_message_without_any_config_gets_one():
    content = write_assignment(RecordDict(), TASK)
    assert read_assignment(content) == TASK


def test_telemetry_survives_the_wire_and_is_taken_out(wire):
    content = wire(write_telemetry(message(), TELEMETRY))
    rest, telemetry = take_telemetry(content)
    assert telemetry == TELEMETRY
    assert set(rest) == {"my-config", "m"}
    assert take_telemetry(message()) == (message(), None)


def test_a_description_survives_the_wire(wire):
    assert read_profile(wire(write_profile(PROFILE))) == PROFILE


def test_sizes_count_strings_lists_and_empty_values():
    content = RecordDict({"c": ConfigRecord({"a": "", "b": "xyz", "l": [1, 2], "e": []})})
    assert content_bytes(content) == 3 + 16


def test_the_weight_of_a_reply_without_one_is_zero():
    assert examples_of(RecordDict({"m": MetricRecord({"n": 5})}), "n") == 5.0
    assert examples_of(RecordDict({"m": MetricRecord({"n": [5]})}), "n") == 0.0
    assert examples_of(RecordDict(), "n") == 0.0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("collapipe.plan", "not json", r"collapipe\.plan is not JSON"),
        ("collapipe.plan", "[]", r"collapipe\.plan must be an object"),
        ("collapipe.plan", "{}", r"collapipe\.plan lacks the key 'bandwidth_hz'"),
        ("collapipe.plan", 5, r"collapipe\.plan must be a string, got int"),
        ("collapipe.split", "{}", r"collapipe\.split lacks the key"),
        ("collapipe.server-round", "1.5", r"server-round must be a whole number, got 1\.5"),
    ],
)
def test_a_malformed_assignment_is_named(key, value, words):
    content = write_assignment(message(), TASK)
    content["my-config"][key] = value
    with pytest.raises(ProtocolError, match=words):
        read_assignment(content)


def test_a_message_from_a_plain_strategy_says_what_is_missing():
    with pytest.raises(ProtocolError, match="wrap the server's strategy in CollaPipe"):
        read_assignment(message())


def test_a_plan_that_skips_a_block_is_refused():
    data = json.loads(to_json(PLAN))
    data["segments"][1]["first_block"] = 2
    content = write_assignment(message(), TASK)
    content["my-config"]["collapipe.plan"] = json.dumps(data)
    with pytest.raises(ProtocolError, match="block 3 comes next"):
        read_assignment(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"micro_batches": "4"}, r"p\.micro_batches must be a whole number, got '4'"),
        ({"micro_batches": True}, r"p\.micro_batches must be a whole number, got True"),
        ({"latency_s": None}, r"p\.latency_s must be a number, got None"),
        ({"segments": {}}, r"p\.segments must be a list"),
        ({"segments": [{}]}, r"p\.segments\[0\] lacks the key 'device_id'"),
        ({"energy_j": {"d1": "much"}}, r"p\.energy_j\.d1 must be a number"),
        ({"extra": 1}, r"p has the unknown key 'extra'"),
    ],
)
def test_json_of_the_wrong_shape_names_the_place(change, words):
    data = json.loads(to_json(PLAN)) | change
    with pytest.raises(ProtocolError, match=words):
        from_json(ClusterPlan, json.dumps(data), "p")


def test_a_whole_number_serves_as_a_float_and_a_value_that_checks_itself_is_heard():
    data = json.loads(to_json(PLAN)) | {"latency_s": 3}
    assert from_json(ClusterPlan, json.dumps(data), "p").latency_s == 3.0
    with pytest.raises(ProtocolError, match="o: optimizer 'lion' is unknown"):
        from_json(OptimizerConfig, '{"name": "lion"}', "o")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=8,
)


@given(
    field=st.sampled_from(sorted(json.loads(to_json(TELEMETRY)))),
    value=ANYTHING,
    cut=st.integers(0),
)
@examples(40, 200)
def test_no_nonsense_from_a_peer_raises_anything_but_a_protocol_error(field, value, cut):
    data = json.loads(to_json(TELEMETRY)) | {field: value}
    text = json.dumps(data)
    for sent in (text, text[: cut % len(text)], json.dumps(value)):
        with suppress(ProtocolError):
            from_json(ClusterMeasurement, sent, "telemetry")


def test_numbers_beyond_all_bounds_are_refused():
    for number in ("1" + "0" * 400, "1" * 5000):
        text = to_json(TELEMETRY).replace("2.5", number)
        with pytest.raises(ProtocolError, match="telemetry"):
            from_json(ClusterMeasurement, text, "telemetry")
