"""Noise on activations: accuracy, what is read, and epsilon, side by side.

A cluster trains what comes behind frozen blocks, on states that their machine has clipped and
noised. The attacker, on the next device, knows clip and deviation and fits its inverter to public
text with as much noise. It knows which frames are of the same text, and takes the mean of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.privacy.recording import compute_hidden, record
from benchmarks.privacy.study import SEED, Batch, Study
from benchmarks.privacy.tokens import Inverter, Read, nearest, share
from collapipe_flwr.federation.privacy_account import Charge, count_epsilon
from collapipe_flwr.federation.run.learner import Evaluator
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import ActivationNoise
from collapipe_flwr.pipeline.private_activations import PrivateActivations

MULTIPLIERS = (0.0, 0.01, 0.03, 0.1, 0.3, 3.0)  # of noise, in units of the clip norm
VISITS = 2  # of every example
DELTA = 1e-5
UNCLIPPED = 0.95  # share of public texts whose states keep their norm


@dataclass(frozen=True, kw_only=True)
class NoiseRow:
    """A run with one noise multiplier; epsilon is None without noise."""

    noise_multiplier: float
    epsilon: float | None
    accuracy: float
    nearest: float
    inverter: float


class NoiseAttack:
    """The attacker behind the middle cut of a study, whose blocks ahead are frozen."""

    def __init__(self, study: Study) -> None:
        _, self.depth, _ = study.sizes.cuts
        plain = study.splitter()
        frozen = plain.front_keys(self.depth)
        self.study, self.splitter = study, Splitter(replace(plain.spec, frozen=frozen))
        self.weights, _ = self.splitter.first_weights(SEED)
        texts = study.public_batches()
        self._public = [
            (batch, hidden[self.depth])
            for batch, hidden in compute_hidden(
                self.splitter, self.weights, texts, study.sizes.cuts[:2]
            )
        ]
        norms = [_mask(h, b).flatten(1).norm(dim=1) for b, h in self._public]
        self.norm = float(torch.cat(norms).quantile(UNCLIPPED))
        model: Any = self.splitter.build_whole(self.weights)
        self._table = model.get_input_embeddings().weight.detach()

    def run(self, members: list[Batch], multiplier: float) -> tuple[NoiseRow, Read]:
        """Train with noise, test, and read; also returns what was to be read."""
        study, deviation = self.study, multiplier * self.norm
        noise = ActivationNoise(behind=self.depth, norm=self.norm, deviation=deviation, secret="a1")
        seen = record(study, self.splitter, members * VISITS, noise)
        frames = seen.hidden[self.depth]
        mean = [torch.stack(frames[i :: len(members)]).mean(0) for i in range(len(members))]
        victims = Read.of(mean, members, study.content(members), "fp32")
        inverter = self._fit(replace(noise, deviation=deviation / VISITS**0.5, secret="b2"))
        scores = Evaluator(self.splitter, study.task, 64)({**self.weights, **seen.after})
        count = study.sizes.examples
        due = Charge(examples=count, batch=count, noise_multiplier=multiplier, steps=VISITS)
        row = NoiseRow(
            noise_multiplier=multiplier,
            epsilon=count_epsilon([due], DELTA) if multiplier else None,
            accuracy=scores["accuracy"],
            nearest=share(nearest(victims.hidden, self._table), victims.tokens),
            inverter=share(inverter.read(victims.hidden), victims.tokens),
        )
        return row, victims

    def _fit(self, noise: ActivationNoise) -> Inverter:
        perturb, hidden = PrivateActivations(noise), []
        for number, (batch, states) in enumerate(self._public):
            perturb.at = (number, 0)
            hidden.append(perturb(states, batch["attention_mask"]))
        texts = [batch for batch, _ in self._public]
        told = Read.of(hidden, texts, self.study.content(texts), "fp32")
        return Inverter(told.hidden.shape[1], self._table).fit(told, self.study.sizes.passes)


def measure_noise(
    study: Study, multipliers: Sequence[float] = MULTIPLIERS
) -> Iterator[tuple[str, Any]]:
    """Yield the parts of the study's record, by name; rows grow with every multiplier."""
    attack, members = NoiseAttack(study), study.batches(study.examples(0))
    about = {"name": study.name, "seed": SEED, "sizes": asdict(study.sizes)}
    spent = {"visits": VISITS, "delta": DELTA, "norm": attack.norm, "depth": attack.depth}
    yield "study", {**about, **spent}
    rows: list[dict[str, Any]] = []
    for multiplier in multipliers:
        row, victims = attack.run(members, multiplier)
        rows.append(asdict(row))
        yield "noise", rows
    counts = victims.tokens.bincount()
    yield "commonest", {"share": float(counts.max() / counts.sum()), "tokens": len(victims.tokens)}


def _mask(hidden_BTD: Tensor, batch: Batch) -> Tensor:
    return hidden_BTD * batch["attention_mask"][..., None]
