"""One simulated setting: clusters, model, radio, budgets and how policies may plan.

There are named presets, over which `overridden` lays what a user chose on the command line.

Models have analytic costs, so that none is in memory. Per token a block of width d does 24 d^2
multiply-add operations' worth of FLOPs in its linear layers (four d x d projections, two d x 4d
ones) and 4 T d in attention over T tokens; the backward pass costs twice the forward pass (Kaplan
et al. 2020, arXiv 2001.08361, section 2.1). Activations kept per block are about 34 d bytes per
token at 16 bits (Korthikanti et al. 2022, arXiv 2205.05198) without the attention maps, twice that
in fp32; AdamW keeps 16 bytes per weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from collapipe_flwr.core.domain import MOST_DEVICES, BlockCost, ModelProfile
from collapipe_flwr.core.errors import ConfigError, prefix_errors
from collapipe_flwr.core.keys import Rule, at_least, between, check, check_keys, key, one_of
from collapipe_flwr.scheduler.policies import POLICIES
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.channel import channel_model
from collapipe_flwr.simulation.devices import (
    FleetCluster,
    device_preset,
    radio_preset,
    read_fleet,
)
from collapipe_flwr.simulation.episode import Distortion
from collapipe_flwr.simulation.world import (
    EnergyBudget,
    World,
    energy_budget,
    make_world,
    mixed_devices,
)

FIVE_SEEDS = (0, 1, 2, 3, 4)
SEED_LIMIT = 2**63
MOST_SEEDS = 10_000  # of a range
_KINDS = ("raspberry-pi-4", "raspberry-pi-5", "jetson-nano", "phone")
WEIGHT_BYTES = 4
STATE_BYTES = 16
STASH_BYTES_PER_UNIT = 68


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """An encoder of equal blocks, its embedding, and a shorter decoder; BERT-base by default."""

    blocks: int = key(12, between(1, 1000))
    width: int = key(768, at_least(1))
    tokens: int = key(128, at_least(1))
    decoder_blocks: int = 2
    vocabulary: int = 30_000
    wire_bytes: int = 2  # of one activation before a link codes it: fp16 unless codecs are named

    def __post_init__(self) -> None:
        check_keys(self, "--")

    def profile(self) -> ModelProfile:
        """Compute costs per example, as the schedulers see them."""
        width, tokens, depth = self.width, self.tokens, self.decoder_blocks
        cut = float(tokens * width * self.wire_bytes)
        forward = tokens * (24.0 * width**2 + 4.0 * tokens * width)
        one = _make_cost(12 * width**2, forward, tokens * width * STASH_BYTES_PER_UNIT, cut)
        table = self.vocabulary * width
        embedding = _make_cost(table, 2.0 * tokens * width, tokens * width * WEIGHT_BYTES, cut)
        head_flop = 2.0 * table * tokens
        stash = depth * one.stash_bytes + tokens * self.vocabulary * WEIGHT_BYTES
        weights = depth * one.parameter_bytes // WEIGHT_BYTES + table
        decoder = _make_cost(weights, depth * one.forward_flop + head_flop, stash, 0.0)
        return ModelProfile(embedding=embedding, blocks=(one,) * self.blocks, decoder=decoder)


def _make_cost(weights: int, forward_flop: float, stash_bytes: float, cut: float) -> BlockCost:
    return BlockCost(
        forward_flop=forward_flop,
        backward_flop=2.0 * forward_flop,
        parameter_bytes=WEIGHT_BYTES * weights,
        state_bytes=STATE_BYTES * weights,
        stash_bytes=float(stash_bytes),
        output_bytes=cut,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything but the policy and the seed; ``fleet`` replaces clusters, devices and kinds."""

    clusters: int = key(4, between(1, 10_000))
    devices: int = key(
        6, between(1, MOST_DEVICES)
    )  # of every cluster, the control unit not counted
    kinds: tuple[str, ...] = _KINDS
    examples: int = key(1000, at_least(1))  # of every cluster, each used once per round
    rounds: int = key(50, between(1, 1_000_000))
    seeds: tuple[int, ...] = (0,)
    policies: tuple[str, ...] = POLICIES
    model: ModelShape = field(default_factory=ModelShape)
    radio: str = "wifi"
    channel: str = "block-fading"
    budget: EnergyBudget = field(default_factory=lambda: EnergyBudget(equal_shares=1.8))
    settings: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(
            micro_batches=(1, 2, 4, 8, 16),
            progress="bound",  # nothing is trained: there is no noise to measure
            schedule="1f1b",
            max_model_share=1 / 3,
            best_batches=True,
        )
    )
    distortion: Distortion = field(default_factory=Distortion)
    # of what plans believe of devices, see `World`
    truth_error: float = key(0.0, Rule(lambda v: 0 <= v < math.inf, "must be >= 0 and finite"))
    fleet: tuple[FleetCluster, ...] = ()
    preset: str = ""  # what it was made from

    def __post_init__(self) -> None:
        check_keys(self, "--")
        if not self.policies:
            raise ConfigError(f"--policies needs at least one of {', '.join(POLICIES)}")
        for name in self.policies:
            check("--policies", name, one_of(*POLICIES))
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError(f"--policies names one twice: {', '.join(self.policies)}")
        if not self.seeds or not all(0 <= seed < SEED_LIMIT for seed in self.seeds):
            raise ConfigError(f"--seeds needs at least one seed, all >= 0, got {self.seeds}")
        if not self.fleet and not self.kinds:
            raise ConfigError("--kinds needs at least one kind of device")
        with prefix_errors("--kinds"):
            for kind in () if self.fleet else self.kinds:
                device_preset(kind)
        with prefix_errors("--radio"):
            radio_preset(self.radio)
        with prefix_errors("--channel"):
            channel_model(self.channel)

    def world(self, seed: int, profile: ModelProfile) -> World:
        """Build the world of one seed."""
        fleet = self.fleet
        drawn = mixed_devices(self.clusters, self.devices, seed, self.kinds)
        return make_world(
            cluster_devices=[cluster.members for cluster in fleet] or drawn,
            examples=[c.examples or self.examples for c in fleet] or [self.examples] * len(drawn),
            radio=self.radio,
            channel=self.channel,
            seed=seed,
            budget=self.budget,
            model=profile,
            cluster_ids=[cluster.cluster_id for cluster in fleet],
            truth_error=self.truth_error,
        )

    def as_json(self) -> dict[str, object]:
        """Plain data that states the setting; boards have neither an id nor a budget."""
        values = {**asdict(self), "budget": str(self.budget)}
        for board in (board for cluster in values["fleet"] for board in cluster["members"]):
            del board["device_id"], board["energy_budget_j"]
        return values


PRESETS: dict[str, Setting] = {
    # Weak boards of a home or office, a BERT-base encoder, Wi-Fi with Rayleigh fading. Six devices
    # share 12 blocks; the default budget, 1.8 equal shares of the work, is 30 % of training alone.
    "paper": Setting(seeds=FIVE_SEEDS),
    # The same with one board that is as fast as all others together and no energy limits: the
    # case for leaving everything on the best device.
    "one-strong": Setting(
        seeds=FIVE_SEEDS,
        kinds=(*_KINDS, "jetson-orin-nano"),
        budget=EnergyBudget(),
    ),
    # Many small clusters that share a 5G cell, members on the move, a model of BERT-large's shape
    # whose state fits no single board here together with its activations.
    "cellular": Setting(
        seeds=FIVE_SEEDS,
        clusters=8,
        devices=5,
        radio="5g",
        channel="mobility",
        model=ModelShape(blocks=24, width=1024),
    ),
}


def preset(name: str | None) -> Setting:
    """Look up a setting by name, plain defaults for None; raise ConfigError with known names."""
    if name is None:
        return Setting()
    if name not in PRESETS:
        raise ConfigError(f"--preset: unknown preset {name!r}; choose {', '.join(PRESETS)}")
    return replace(PRESETS[name], preset=name)


T = TypeVar("T", Setting, ModelShape, SchedulerConfig, Distortion)
# Fields that are not called like their option of `collapipe simulate`.
_FIELDS = {
    "energy_budget": "budget",
    "devices_from": "fleet",
    "profile_error": "error",
    "profile_error_kind": "kind",
    "profile_delay": "delay",
}


def overridden(base: Setting, **options: Any) -> Setting:
    """Override ``base`` with what was chosen; raise ConfigError or ScheduleError.

    ``options`` are those of ``collapipe simulate`` by name. What is missing or None leaves
    ``base`` as it is.
    """
    readers: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("policies", "kinds", "codecs"), _words),
        "seeds": seeds_of,
        "energy_budget": energy_budget,
        "devices_from": read_fleet,
    }
    given = {
        _FIELDS.get(name, name): readers[name](value) if name in readers else value
        for name, value in options.items()
        if value is not None
    }
    if "codecs" in given:
        given["wire_bytes"] = 4

    def chosen(part: T) -> T:
        return replace(part, **{f.name: given[f.name] for f in fields(part) if f.name in given})

    return replace(
        chosen(base),
        model=chosen(base.model),
        settings=chosen(base.settings),
        distortion=chosen(base.distortion),
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse the value of option ``name`` as whole numbers; raise ConfigError for anything else."""
    words = _words(text)
    if not words or not all(word.isdecimal() for word in words):
        option = name.replace("_", "-")
        raise ConfigError(f'--{option} must list whole numbers, for example "1,2,4", got {text!r}')
    return tuple(int(word) for word in words)


def seeds_of(text: str) -> tuple[int, ...]:
    """``0,1,7`` or ranges like ``100-119``, both ends included; raises ConfigError."""
    seeds: list[int] = []
    for word in _words(text) or ("",):
        first, dash, last = word.partition("-")
        low, high = whole_numbers("seeds", first)[0], whole_numbers("seeds", last or first)[0]
        if (dash and not last) or high < low or high - low >= MOST_SEEDS:
            raise ConfigError(f'--seeds: a range is like "100-119", got {word!r}')
        seeds += range(low, high + 1)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds names one twice: {text}")
    return tuple(seeds)
