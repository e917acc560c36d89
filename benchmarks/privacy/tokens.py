"""Which tokens hidden states tell: by the nearest embedding, an inverter, and search.

Every attacker has the public checkpoint. The inverter is fitted to hidden states that it computes
of public text, and of as many tokens drawn from the whole vocabulary, as the codec of the link
leaves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.privacy.recording import Recording, coded, compute_hidden
from benchmarks.privacy.study import SEED, Batch, Study
from collapipe_flwr.models.splitter import Splitter

CODECS = ("fp32", "fp16", "int8", "int4")
FITTED = ("fp32", "int4")  # inverters; that for fp32 reads fp16 and int8 as well
_ROWS = 256  # tokens at a time
_FOREIGN = 1500  # tokens of the vocabulary that public text lacks, in the inverter's loss
_RIDGE = 100.0
_INNER = 512  # units of the inverter's network


@dataclass(frozen=True)
class Read:
    """Hidden states (N, D) of tokens (N,)."""

    hidden: Tensor
    tokens: Tensor

    @staticmethod
    def of(
        hidden: Sequence[Tensor], batches: Iterable[Batch], masks: Sequence[Tensor], codec: str
    ) -> Read:
        """The masked places of (B, T, D) batches, each as the codec leaves it."""
        found = [coded(h, codec)[mask] for h, mask in zip(hidden, masks, strict=True)]
        ids = [b["input_ids"][mask] for b, mask in zip(batches, masks, strict=True)]
        return Read(torch.cat(found), torch.cat(ids))

    def planted(self, table: Tensor) -> Read:
        """With the embedding of each token added: a leak that every attack must find."""
        size = self.hidden.norm(dim=1, keepdim=True)
        leak = functional.normalize(table[self.tokens], dim=1)
        return replace(self, hidden=self.hidden + size * leak)

    def shuffled(self) -> Read:
        """With the tokens in another order: nothing is to be learned from it."""
        order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(SEED))
        return replace(self, tokens=self.tokens[order])


def nearest(found: Tensor, table: Tensor) -> Tensor:
    """The tokens (N,) whose embeddings have the largest cosine with (N, D)."""
    rows = functional.normalize(table, dim=1)
    return torch.cat([(some @ rows.T).argmax(1) for some in torch.split(found, _ROWS)])


class Inverter(nn.Module):
    """Maps a hidden state to the embedding of its token: a linear map and a small network."""

    def __init__(self, width: int, table: Tensor) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.table = functional.normalize(table, dim=1)
        self.linear = nn.Linear(width, table.shape[1])
        self.narrow = nn.Linear(_INNER, table.shape[1])
        self.network = nn.Sequential(nn.Linear(width, _INNER), nn.GELU(), self.narrow)
        self.sharpness = nn.Parameter(torch.tensor(20.0))
        self.mean, self.spread = torch.zeros(width), torch.ones(())

    def forward(self, hidden: Tensor) -> Tensor:
        scaled = (hidden - self.mean) / self.spread
        return functional.normalize(self.linear(scaled) + self.network(scaled), dim=1)

    @torch.no_grad()
    def read(self, hidden: Tensor) -> Tensor:
        """The tokens (N,) of (N, D)."""
        return nearest(self(hidden), self.table)

    @torch.no_grad()
    def propose(self, hidden: Tensor, count: int) -> Tensor:
        """The likeliest tokens (N, count), the best first."""
        scores: Tensor = self(hidden) @ self.table.T
        return scores.topk(count, dim=1).indices

    def fit(self, public: Read, passes: int) -> Inverter:
        """Begin with ridge regression, go on with cross-entropy by cosines."""
        self.mean = public.hidden.mean(0)
        self.spread = (
            public.hidden.std()
        )  # of all together: some hardly vary, until they are trained
        scaled = functional.pad((public.hidden - self.mean) / self.spread, (0, 1), value=1.0)
        square = scaled.T @ scaled + _RIDGE * torch.eye(scaled.shape[1])
        solved = torch.linalg.solve(square, scaled.T @ self.table[public.tokens])
        with torch.no_grad():
            self.linear.weight.copy_(solved[:-1].T)
            self.linear.bias.copy_(solved[-1])
            self.narrow.weight.zero_()
            self.narrow.bias.zero_()
        known, target = torch.unique(public.tokens, return_inverse=True)
        foreign = torch.ones(len(self.table), dtype=torch.bool)
        foreign[known] = False
        others = foreign.nonzero().flatten()
        chosen = others[torch.randperm(len(others))[:_FOREIGN]]
        table = self.table[torch.cat([known, chosen])]
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        for _ in range(passes):
            for some in torch.split(torch.randperm(len(target)), _ROWS):
                scores = self.sharpness * self(public.hidden[some]) @ table.T
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(scores, target[some]))
                optimizer.step()
        return self


class Search:
    """Finds a text token by token: whose hidden state behind ``depth`` blocks is the nearest?

    For decoders, whose states depend on the tokens so far alone. ``model`` is known and unsplit.
    """

    def __init__(self, model: Any, depth: int) -> None:
        body = model.get_decoder()
        self._body = body
        self._all = body.layers
        self._depth, self._norm = depth, body.norm

    @torch.no_grad()
    def read(self, hidden: Tensor, candidates: Tensor, known: Tensor) -> Tensor:
        """The tokens (T,) of hidden states (T, D), of (T, C) candidates behind those known."""
        self._body.layers, self._body.norm = self._all[: self._depth], nn.Identity()
        found = known
        try:
            while len(found) < len(hidden):
                place = len(found)
                states = self._try(found, candidates[place])
                far = (states - hidden[place]).square().sum(1)
                found = torch.cat([found, candidates[place][far.argmin()][None]])
        finally:
            self._body.layers, self._body.norm = self._all, self._norm
        return found

    def _try(self, found: Tensor, candidates: Tensor) -> Tensor:
        """States (C, D) of candidates as the next token: in one row, but blind to each other."""
        before, count = len(found), len(candidates)
        seen = torch.ones(before + count, before + count, dtype=torch.bool).tril()
        seen[before:, before:] = torch.eye(count, dtype=torch.bool)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        places = torch.cat([torch.arange(before), torch.full((count,), before)])
        states: Tensor = self._body(
            input_ids=torch.cat([found, candidates])[None],
            attention_mask=mask[None, None],
            position_ids=places[None],
            use_cache=False,
        ).last_hidden_state
        return states[0, before:]


@dataclass(frozen=True)
class TokenAttacks:
    """What was read, by depth, attack and codec; and the controls at the deepest cut."""

    rates: dict[int, dict[str, dict[str, float]]]
    controls: dict[str, float]
    tokens: int  # that were to be read
    commonest: float  # the share of the most frequent of them
    public_tokens: int
    searched_tokens: int = 0


def attack_tokens(study: Study, splitter: Splitter, seen: Recording) -> TokenAttacks:
    """Attack the link behind every cut. Attackers compute with the checkpoint, as published."""
    sizes, masks = study.sizes, study.content(seen.batches)
    model: Any = splitter.build_whole(seen.before)
    table = model.get_input_embeddings().weight.detach()
    natural = list(study.public_batches())
    texts = natural + study.scramble(natural)  # public text lacks many of the victims' tokens
    public = list(compute_hidden(splitter, seen.before, texts, sizes.cuts))
    theirs = study.content(texts)
    rates: dict[int, dict[str, dict[str, float]]] = {}
    searched = 0

    def known(depth: int, codec: str) -> Read:
        return Read.of([hidden[depth] for _, hidden in public], texts, theirs, codec)

    def victims(depth: int, codec: str) -> Read:
        return Read.of(seen.hidden[depth], seen.batches, masks, codec)

    def fitted(told: Read) -> Inverter:
        return Inverter(told.hidden.shape[1], table).fit(told, sizes.passes)

    def reads(inverter: Inverter, found: Read) -> float:
        return share(inverter.read(found.hidden), found.tokens)

    for depth in sizes.cuts:
        inverters = {codec: fitted(known(depth, codec)) for codec in FITTED}
        by: dict[str, dict[str, float]] = {"nearest": {}, "inverter": {}}
        rates[depth] = by
        for codec in CODECS:
            found = victims(depth, codec)
            by["nearest"][codec] = share(nearest(found.hidden, table), found.tokens)
            by["inverter"][codec] = reads(inverters.get(codec, inverters["fp32"]), found)
        if sizes.searched and depth:
            search = Search(model, depth)
            rate, searched = _search(study, seen, masks, search, depth, inverters["fp32"])
            by["search"] = {"fp32": rate}
    public_ones, deepest = known(depth, "fp32"), victims(depth, "fp32")
    untrained = Inverter(deepest.hidden.shape[1], table)
    counts = deepest.tokens.bincount()
    return TokenAttacks(
        rates=rates,
        controls={
            "planted": reads(fitted(public_ones.planted(table)), deepest.planted(table)),
            "shuffled": reads(fitted(public_ones.shuffled()), deepest),
            "untrained": reads(untrained, deepest),
        },
        tokens=len(deepest.tokens),
        commonest=float(counts.max() / counts.sum()),
        public_tokens=len(public_ones.tokens),
        searched_tokens=searched,
    )


def _search(
    study: Study,
    seen: Recording,
    masks: Sequence[Tensor],
    search: Search,
    depth: int,
    inverter: Inverter,
) -> tuple[float, int]:
    """The share of the first texts' tokens that search reads, and how many there were."""
    sizes, start = study.sizes, study.start(seen.batches)
    right = tried = 0
    for row in range(sizes.searched):
        batch, place = divmod(row, sizes.batch)
        ids, mask = seen.batches[batch]["input_ids"][place], masks[batch][place]
        stop = int(mask.nonzero().max()) + 1
        hidden = seen.hidden[depth][batch][place, :stop]
        found = search.read(hidden, inverter.propose(hidden, sizes.candidates), ids[:start])
        right += int((found == ids[:stop])[mask[:stop]].sum())
        tried += int(mask.sum())
    return right / tried, tried


def share(found: Tensor, wanted: Tensor) -> float:
    """How many are right."""
    return float((found == wanted).float().mean())
