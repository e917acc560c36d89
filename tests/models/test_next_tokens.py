"""The loss of a language model over pieces of a batch is that of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collapipe_flwr.models import next_tokens
from collapipe_flwr.models.next_tokens import average_pieces, cut_tokens
from collapipe_flwr.models.part import LossPart
from collapipe_flwr.models.parts import EdgePart
from collapipe_flwr.models.splitter import Splitter
from tests.models.conftest import OVERRIDES, VOCABULARY
from tests.models.test_exactness import CASES
from tests.thorough import few

TYPES = sorted({kind for kind, task, _ in CASES if task == "causal-lm"})
ALWAYS = ("gemma3_text", "gpt2", "granite", "llama", "mamba2", "opt")
PIECES = [4, 9, 30]  # tokens: less than a text, less than two of them, more


def make_edge(kind: str, tiny: Any, monkeypatch: pytest.MonkeyPatch, tokens: int) -> EdgePart:
    """A frozen head that computes with pieces of so many tokens."""
    monkeypatch.setattr(next_tokens, "PIECE_BYTES", 4 * VOCABULARY * tokens)
    splitter = Splitter(tiny.spec(kind, "causal-lm", ties="untie"))
    monkeypatch.setattr(EdgePart, "_adopt", adopt_frozen)
    edge = splitter.build_edge(splitter.initial_weights(seed=2))
    assert isinstance(edge, EdgePart)
    return edge.train()


def adopt_frozen(edge: EdgePart, *tensor: Any) -> None:
    """Adopt a tensor that does not train."""
    super(EdgePart, edge)._adopt(*tensor)
    edge.requires_grad_(False)


def draw(edge: EdgePart, texts: int = 4, length: int = 11) -> tuple[Any, dict[str, Any]]:
    """Hidden states, and labels of which some texts have few and one has none."""
    random = torch.Generator().manual_seed(3)
    width = edge.model.config.hidden_size
    hidden_BTD = torch.randn(texts, length, width, generator=random).requires_grad_()
    labels_BT = torch.randint(3, VOCABULARY, (texts, length), generator=random)
    labels_BT[0, :7] = labels_BT[1, 2:] = labels_BT[2] = -100
    return hidden_BTD, {"labels": labels_BT, "attention_mask": torch.ones_like(labels_BT)}


@pytest.mark.parametrize("kind", few(TYPES, *(TYPES.index(kind) for kind in ALWAYS)))
@pytest.mark.parametrize("tokens", few(PIECES, 1))
def test_pieces_have_the_loss_and_gradient_of_the_whole(
    kind: str, tokens: int, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = make_edge(kind, tiny, monkeypatch, tokens)
    hidden_BTD, batch = draw(edge)
    assert len(cut_tokens(batch["labels"], tokens)) > 1 or tokens == max(PIECES)
    assert edge.piece_tokens == tokens
    loss = edge(hidden_BTD, batch) * 3.0
    loss.backward()
    gradient_BTD, hidden_BTD.grad = hidden_BTD.grad, None
    expected = LossPart.forward(edge, hidden_BTD, batch) * 3.0
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient_BTD, hidden_BTD.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", few(TYPES, *(TYPES.index(kind) for kind in ALWAYS)))
def test_pieces_have_the_predictions_of_the_whole(
    kind: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = make_edge(kind, tiny, monkeypatch, 9).eval()
    hidden_BTD, batch = draw(edge)
    with torch.no_grad():
        loss, ids_BT = edge.judge(hidden_BTD, batch)
        expected, expected_BT = LossPart.judge(edge, hidden_BTD, batch)
        again = edge(hidden_BTD, batch)
        _, logits = edge.judge(hidden_BTD, batch, scores=True)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(ids_BT, expected_BT)
    assert logits.shape == (*ids_BT.shape, VOCABULARY)


def test_a_batch_without_labels_has_no_loss(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = make_edge("llama", tiny, monkeypatch, 9)
    hidden_BTD, batch = draw(edge)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = edge(hidden_BTD, batch)
    loss.backward()
    assert loss == 0 and not hidden_BTD.grad.any()
    judged, ids_BT = edge.eval().judge(hidden_BTD, batch)
    assert judged == 0 and torch.equal(ids_BT, LossPart.judge(edge, hidden_BTD, batch)[1])


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("llama", {}),  # its table trains
        ("gpt2", {"sizes": tuple({**OVERRIDES["gpt2"], "embd_pdrop": 0.1}.items())}),
    ],
)
def test_heads_that_train_or_drop_out_see_whole_batches(
    kind: str, choices: dict[str, Any], tiny: Any
) -> None:
    splitter = Splitter(tiny.spec(kind, "causal-lm", ties="untie", **choices))
    edge = splitter.build_edge(splitter.initial_weights(seed=2))
    assert isinstance(edge, EdgePart) and edge.piece_tokens is None
    if choices:
        assert edge.requires_grad_(False)._works_by_token(edge._objective) is False


@pytest.mark.parametrize("most", [2, 5, 8, 13, 44])
def test_every_token_stands_in_one_piece(most: int) -> None:
    labels_BT = torch.arange(40).view(4, 10)
    labels_BT[1] = -100
    pieces = cut_tokens(labels_BT, most, every=True)
    stood = [piece.places_BT[piece.stands_BT] for piece in pieces]
    if most == 44:
        assert not pieces
        return
    assert torch.equal(torch.cat(stood), torch.arange(40))
    assert all(piece.places_BT.numel() <= most for piece in pieces)
    assert sum(piece.share for piece in pieces) == pytest.approx(1.0)


def test_scores_are_never_all_there() -> None:
    """Only the piece that is scored has more than its hidden states."""
    held = list[int]()

    def lose(hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        scores = hidden_BTD @ torch.ones(4, VOCABULARY)
        held.append(scores.numel())
        return torch.nn.functional.cross_entropy(
            scores[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
        )

    hidden_BTD = torch.randn(8, 16, 4, requires_grad=True)
    labels_BT = torch.randint(0, VOCABULARY, (8, 16))
    loss = average_pieces(lose, hidden_BTD, cut_tokens(labels_BT, 32))
    kept = loss.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert max(held) == 32 * VOCABULARY and len(held) >= 4
    assert [tensor.shape for tensor in kept] == [hidden_BTD.shape]
