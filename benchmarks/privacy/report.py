"""``collapipe bench privacy``: every attack on every study, controls, the depth that is enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.privacy.noise import MULTIPLIERS, measure_noise
from benchmarks.privacy.recording import record
from benchmarks.privacy.study import SEED, Study
from benchmarks.privacy.tokens import attack_tokens
from benchmarks.privacy.updates import attack_labels, attack_update, read_next_tokens
from benchmarks.trusted_depth import CLUSTERS, PLACES, cell
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.reporting.output import number_table, prepare, progress, terminal, write_json
from collapipe_flwr.simulation.setting import PRESETS

Json = dict[str, Any]
WORLD = "paper"  # of the seconds
_FOUND = 0.95  # a planted leak is
_DEVIATIONS = 4.0  # from chance, at most, without a leak
_PARTS = {"noise": 2 + len(MULTIPLIERS)}  # of a study


def run_privacy_bench(studies: Sequence[Study], at_most: float, json_file: Path | None) -> None:
    """Attack with a progress bar, print tables, write a file; raises RunError for odd controls."""
    prepare("--json", json_file)
    torch.set_num_threads(1)
    told: list[Json] = []
    with progress(sum(_PARTS.get(study.name, 6) for study in studies)) as tick:
        for study in studies:
            told.append({})
            for name, found in measure(study) if study.name != "noise" else _measure_noise(study):
                told[-1][name] = found
                write_json(json_file, {"studies": told})
                tick(f"{study.name}: {name}")
    console = terminal()
    for each in told:
        console.print(_noise_table(each) if "noise" in each else _table(each))
        if "tokens" in each:
            console.print(advice(each, at_most))
    odd = [
        f"{e['study']['name']}: {c['name']}" for e in told for c in e["controls"] if not c["held"]
    ]
    if odd:
        raise RunError(f"controls failed, so that nothing is shown: {', '.join(odd)}")


def measure(study: Study) -> Iterator[tuple[str, Any]]:
    """The parts of a study's record, by name."""
    splitter, sizes = study.splitter(), study.sizes
    members = study.batches(study.examples(0))
    others = study.batches(study.examples(1))
    seen = record(study, splitter, members)
    yield "study", {"name": study.name, "seed": SEED, "sizes": asdict(sizes)}
    tokens = attack_tokens(study, splitter, seen)
    yield "tokens", asdict(tokens)
    classes = seen.batches[0]["labels"].dim() == 1
    labels = attack_labels(seen) if classes else read_next_tokens(splitter, seen)
    yield "labels", asdict(labels)
    content = study.content([*members, *others])
    updates = {"full": attack_update(splitter, seen, others, content)}
    adapted = study.splitter(adapted=True)
    gentle = replace(sizes, learning_rate=10 * sizes.learning_rate)  # usual for adapters
    seen = record(replace(study, sizes=gentle), adapted, members)
    updates["adapters"] = attack_update(adapted, seen, others, content)
    yield "updates", {name: asdict(update) for name, update in updates.items()}
    chance = [_below(tokens.commonest, tokens.tokens), _below(labels.commonest, labels.examples)]
    controls = [
        _control("tokens, planted", tokens.controls["planted"], _FOUND, 1.0),
        _control("tokens, shuffled", tokens.controls["shuffled"], 0.0, chance[0]),
        _control("tokens, untrained", tokens.controls["untrained"], 0.0, chance[0]),
        _control("labels, planted", labels.controls["planted"], _FOUND, 1.0),
        _control("labels, shuffled", labels.controls["shuffled"], 0.0, chance[1]),
    ]
    for name, update in updates.items():
        for what, area in update.controls.items():
            kind, of = what.split()
            far = _DEVIATIONS * update.deviations[of]
            least, most = (_FOUND, 1.0) if kind == "planted" else (0.5 - far, 0.5 + far)
            controls.append(_control(f"{name}: {of}, {kind}", area, least, most))
    yield "controls", controls
    yield "seconds", _seconds(splitter, study)


def _measure_noise(study: Study) -> Iterator[tuple[str, Any]]:
    """The parts of the record of noise, whose controls are its ends: all is read, or nothing."""
    rows: list[Json] = []
    for name, found in measure_noise(study):
        if name == "noise":
            rows = found
        if name != "commonest":
            yield name, found
    chance = _below(found["share"], found["tokens"])
    most = [max(rows[place]["nearest"], rows[place]["inverter"]) for place in (0, -1)]
    yield (
        "controls",
        [
            _control("tokens, no noise", most[0], _FOUND, 1.0),
            _control("tokens, most noise", most[1], 0.0, chance),
        ],
    )


def _control(name: str, value: float, least: float, most: float) -> Json:
    bounds = {"least": least, "most": most, "held": least <= value <= most}
    return {"name": name, "value": value, **bounds}


def _below(commonest: float, count: int) -> float:
    """What always naming the commonest one gets, with room for chance."""
    return commonest + _DEVIATIONS * math.sqrt(commonest * (1 - commonest) / count)


def _seconds(splitter: Splitter, study: Study) -> dict[str, dict[int, float | None]]:
    """Seconds per simulated round by the edge's place and the number of trusted blocks."""
    length = study.data.max_source_length
    model = profile_model(splitter, BatchShape(source_length=length, target_length=length))
    setting = replace(PRESETS[WORLD], clusters=CLUSTERS)
    return {
        where: {depth: cell(setting, model, where, depth) for depth in study.sizes.cuts}
        for where in PLACES
    }


def recovery(told: Json) -> dict[int, float]:
    """The share of tokens that the best attack reads behind each cut, whatever the codec."""
    return {
        int(depth): max(rate for codecs in attacks.values() for rate in codecs.values())
        for depth, attacks in told["tokens"]["rates"].items()
    }


def least_depth(rates: Mapping[int, float], at_most: float) -> int | None:
    """The first measured cut at and behind which no attack reads more; None if there is none."""
    enough = None
    for depth in sorted(rates, reverse=True):
        if rates[depth] > at_most:
            break
        enough = depth
    return enough


def advice(told: Json, at_most: float) -> str:
    """The least depth for a recovery rate, and its price."""
    name, rates = told["study"]["name"], recovery(told)
    depth = least_depth(rates, at_most)
    if depth is None:
        deepest = max(rates)
        return (
            f"{name}: no depth keeps recovery at {at_most:.0%}: behind all {deepest} blocks it is "
            f"{rates[deepest]:.0%}"
        )
    prices = []
    for where, by_depth in told["seconds"].items():
        seconds = {int(k): value for k, value in by_depth.items()}
        now, before = seconds[depth], seconds[0]
        ratio = "no plan" if now is None or before is None else f"{now / before:.2f}"
        prices.append(f"{where} {ratio}")
    return (
        f"{name}: privacy.trusted-blocks={depth} is the least that was measured to keep recovery "
        f"at {at_most:.0%} ({rates[depth]:.0%}); seconds per round over those of 0, by the "
        f"edge's place: {', '.join(prices)}"
    )


def _noise_table(told: Json) -> Any:
    names = list(told["noise"][0])
    table = number_table("Noise on activations", [], names)
    for row in told["noise"]:
        table.add_row(*("" if row[n] is None else f"{row[n]:.4g}" for n in names))
    return table


def _table(told: Json) -> Any:
    rates = told["tokens"]["rates"]
    columns = [
        (attack, codec) for attack, by in next(reversed(rates.values())).items() for codec in by
    ]
    names = ["blocks", *(f"{attack} {codec}" for attack, codec in columns)]
    table = number_table(f"{told['study']['name']}: tokens read behind so many blocks", [], names)
    for depth, by in rates.items():
        cells = (by.get(attack, {}).get(codec) for attack, codec in columns)
        table.add_row(str(depth), *("" if each is None else f"{each:.0%}" for each in cells))
    return table
