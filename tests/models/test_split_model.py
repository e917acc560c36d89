"""Torch modules of any kind: split over threads they train as their user's own loop does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from collapipe_flwr.cluster.control_unit import evaluate_batches
from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.unsplit import evaluate_unsplit
from collapipe_flwr.core.errors import ModelError, ScheduleError
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.split_model import SplitModel, as_batch
from collapipe_flwr.models.splitter import splitter_of
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.closeness import assert_near, near
from tests.models import own_losses, own_models
from tests.models.test_own_models import CALM, CUTS, by_hand, cut_up
from tests.rounds import (
    SGD,
    Cut,
    micro_batches,
    train_split,
    train_whole,
)
from tests.thorough import few

WHOLE = Cut(stops=(2, 4), micro_batches=(6,))


def texts(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (6, 9), generator=random)
    lengths = torch.randint(3, 10, (6,), generator=random)
    tokens[torch.arange(9)[None] >= lengths[:, None]] = 0
    return {"inputs": tokens, "labels": torch.randint(0, 3, (6,), generator=random)}


def pictures(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (6,), generator=random)
    return {"x": torch.randn(6, 3, 16, 16, generator=random), "labels": labels}


def features(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (6,), generator=random)
    return {"x": torch.randn(6, 5, generator=random), "labels": labels}


def writings(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (6, 8), generator=random)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def hand_loss(model: Any, step: Mapping[str, Tensor]) -> Tensor:
    if isinstance(model, own_models.Decoder):
        return model(**step)["loss"]
    (name,) = set(step) - {"labels"}
    return functional.cross_entropy(model(step[name]), step["labels"])


CASES = {
    "text": (own_models.TextClassifier, texts),
    "vision": (own_models.VisionTransformer, pictures),
    "decoder": (own_models.Decoder, writings),
    "masked": (own_models.Masked, writings),
    "causal": (own_models.CausalEncoder, texts),
    "rotary": (own_models.Rotary, texts),
}


def live(kind: type[nn.Module], batches: Any, **choices: Any) -> tuple[nn.Module, SplitModel]:
    torch.manual_seed(11)
    model = kind()
    return model, SplitModel(model, example=batches(0), **choices)


@pytest.mark.parametrize("cut", few(CUTS, len(CUTS) - 1), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_the_users_own_loop(case: str, cut: Cut) -> None:
    kind, batches = CASES[case]
    model, split_model = live(kind, batches)
    splitter = splitter_of(split_model.spec.to_json())
    weights = {key: tensor.clone() for key, tensor in split_model.weights().items()}
    steps = [batches(seed) for seed in range(1, 4)]
    cut_steps = [cut_up(step, cut.micro_batches) for step in steps]
    losses, split = train_split(splitter, weights, cut, cut_steps, CALM)
    assert losses == near(tuple(by_hand(model, hand_loss, steps, adamw=True)))
    assert_near(splitter.whole_state(split), dict(model.state_dict()))


@pytest.mark.parametrize("edge_blocks", few([0, 1], 1))
@pytest.mark.parametrize("case", few(CASES, 0, 1, 2, 5))
def test_gradients_equal_the_users_own(case: str, edge_blocks: int) -> None:
    kind, batches = CASES[case]
    model, split_model = live(kind, batches, edge_blocks=edge_blocks)
    splitter = split_model.splitter
    weights = {key: tensor.clone() for key, tensor in split_model.weights().items()}
    cut = Cut(stops=(1, 4 - edge_blocks), micro_batches=(4, 2))
    _, split = train_split(splitter, weights, cut, [cut_up(batches(5), (4, 2))], SGD)
    by_hand(model, hand_loss, [batches(5)], adamw=False)
    assert_near(splitter.whole_state(split), dict(model.state_dict()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", few(CASES, 0, 2))
def test_logits_come_back(case: str) -> None:
    kind, batches = CASES[case]
    model, split_model = live(kind, batches)
    splitter, weights = split_model.splitter, split_model.weights()
    cut, whole = CUTS[1], batches(9)
    steps = [cut_up(whole, cut.micro_batches)]
    settings = LearningSettings(optimizer=SGD, deadline_s=20.0)
    order = TrainingOrder(plan=cut.plan(), weights=weights, learning=settings)
    wanted = PredictionConfig(logits=True)
    if not splitter.ties:
        batches_cut, fleet = micro_batches(splitter, steps), ThreadFleet(ThreadEdge())
        found = evaluate_batches(splitter, order, batches_cut, fleet, wanted=wanted)
    unsplit = evaluate_unsplit(splitter, splitter.build_whole(weights), steps, wanted)
    model.train(False)
    with torch.no_grad():
        loss = float(hand_loss(model, whole))
    counted = splitter.weight_of(whole)
    assert unsplit.loss == near(loss) and unsplit.targets == counted
    if not splitter.ties:
        assert found.loss == near(loss) and found.targets == counted
        ours, theirs = (torch.cat(of.predictions[0]) for of in (found, unsplit))
        assert_near({"": ours}, {"": theirs})


@pytest.mark.parametrize(
    ("kind", "batches"), [(own_models.Dropping, texts), (own_models.Noisy, pictures)]
)
def test_dropout_and_noise_do_not_depend_on_the_cut(kind: type[nn.Module], batches: Any) -> None:
    _, split_model = live(kind, batches)
    splitter, weights = split_model.splitter, split_model.weights()
    assert splitter.drops
    steps, cuts = [cut_up(batches(3), (3, 3))], [(4,), (1, 2, 4)]
    found = [
        train_split(
            splitter, weights, Cut(stops=stops, micro_batches=(3, 3)), steps, SGD, dropout_seed=7
        )
        for stops in cuts
    ]
    assert found[0][0] == near(found[1][0])
    assert_near(found[0][1], found[1][1])
    assert not SplitModel(own_models.TextClassifier(), example=texts(0)).splitter.drops


def test_running_statistics_come_back() -> None:
    model, split_model = live(own_models.BatchNormed, features)
    splitter, weights = split_model.splitter, split_model.weights()
    assert splitter.whole_batches
    assert "norm.running_mean" not in splitter.constant_keys
    steps = [features(seed) for seed in range(1, 4)]
    losses, split = train_split(splitter, weights, WHOLE, [[step] for step in steps], CALM)
    assert losses == near(tuple(by_hand(model, hand_loss, steps, adamw=True)))
    assert_near(
        {key: tensor for key, tensor in split.items() if tensor.is_floating_point()},
        {key: t for key, t in model.state_dict().items() if t.is_floating_point()},
    )
    assert int(split["norm.num_batches_tracked"]) == 3
    assert int(split["blocks.1.norm.num_batches_tracked"]) == 3


def test_its_counters_have_no_optimizer() -> None:
    _, split_model = live(own_models.BatchNormed, features)
    optimizer_bytes = OptimizerConfig(name="AdamW").state_bytes
    costs = profile_model(split_model.splitter, split_model.shape, optimizer_bytes).blocks
    assert len({cost.state_bytes for cost in costs}) == 1


def test_batches_that_such_a_model_sees_are_not_cut() -> None:
    _, split_model = live(own_models.BatchNormed, features)
    steps = [cut_up(features(1), (3, 3))]
    with pytest.raises(ScheduleError, match=r"with whole batches: plan one"):
        train_split(split_model.splitter, split_model.weights(), CUTS[1], steps, SGD)


def test_recomputed_blocks_count_a_batch_once() -> None:
    _, split_model = live(own_models.BatchNormed, features)
    segment = split_model.splitter.build_segment(0, 4, split_model.weights())
    segment.compute_again(nullcontext)
    hidden = torch.randn(6, 12, requires_grad=True)
    segment(hidden, {}).sum().backward()
    assert int(segment.state_dict()["blocks.0.norm.num_batches_tracked"]) == 1


@pytest.mark.parametrize("case", few(CASES, 1, 3))
def test_parts_hold_their_own_tensors_only(case: str) -> None:
    """The edge computes ahead of the blocks on zeros that take no memory."""
    _, split_model = live(*CASES[case])
    splitter, weights = split_model.splitter, split_model.weights()
    parts = (
        splitter.build_embedding(weights),
        splitter.build_segment(1, 2, weights),
        splitter.build_edge(weights),
    )
    for part in parts:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in part.model.parameters()
        }
        owned = sum(tensor.numel() * 4 for tensor in part.state_dict().values())
        assert sum(storages.values()) <= owned + 4 * len(splitter.all_keys())


def test_arguments_build_the_model_everywhere() -> None:
    split_model = SplitModel(
        own_models.VisionTransformer, arguments={"blocks": 2, "width": 16}, example=pictures(0)
    )
    splitter = splitter_of(split_model.spec.to_json())
    assert splitter.num_blocks == 2
    assert tuple(splitter.state_keys) == tuple(split_model.model.state_dict())
    costs = profile_model(splitter, split_model.shape)
    assert costs.blocks[0].output_bytes == 17 * 16 * 4


def test_a_function_may_know_the_arguments_of_what_it_builds() -> None:
    splitter = SplitModel(own_models.sixteen_wide, example=pictures(0)).splitter
    assert splitter.spec.build == "tests.models.own_models:sixteen_wide"
    assert splitter.shapes["head.weight"][0] == (3, 16)


def test_blocks_may_be_computed_again() -> None:
    split_model = SplitModel(own_models.TextClassifier, arguments={"blocks": 5}, example=texts(0))
    splitter, weights = split_model.splitter, split_model.weights()
    cut, steps = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 2)), [cut_up(texts(3), (2, 2, 2))]
    (kept, again) = (
        train_split(splitter, weights, cut, steps, SGD, execution=Execution(recompute=wanted))
        for wanted in (False, True)
    )
    assert kept[0] == near(again[0])
    assert_near(kept[1], again[1])


def test_what_a_trace_cannot_tell_is_named() -> None:
    model = own_models.VisionTransformer()
    assert "head.bias" in SplitModel(model, example=pictures(0)).splitter.edge_keys()
    with pytest.raises(ModelError, match="embed or head names 'neck', which holds no tensor"):
        SplitModel(model, example=pictures(0), embed=("neck",))
    with pytest.raises(ModelError, match="personal names 'neck'"):
        SplitModel(model, example=pictures(0), personal=("neck",))
    with pytest.raises(ModelError, match=r"name what it reads by inputs="):
        SplitModel(model, example={"img": pictures(0)["x"], "labels": pictures(0)["labels"]})
    named = SplitModel(
        model, example={"img": pictures(0)["x"], "label": pictures(0)["labels"]}, inputs=("img",)
    )
    batch = {"img": pictures(1)["x"], "label": pictures(1)["labels"]}
    assert set(named.splitter.context(batch)) == {"label", "shape/img"}
    assert named.splitter.weight_of(batch) == 6


@pytest.mark.parametrize(
    ("example", "choices", "reason"),
    [
        ({"x": pictures(0)["x"]}, {}, "needs the tensor 'labels' to compute a loss"),
        (pictures(0), {"weight": "importance"}, "needs the tensor 'importance'"),
        ({**pictures(0), "labels": torch.zeros(6, 2).long()}, {}, "cross_entropy fails: "),
        (pictures(0), {"loss": "tests.models.own_models:nothing"}, "leads nowhere"),
        (
            pictures(0),
            {"loss": "tests.models.own_models:reads_pictures"},
            "KeyError: 'x'; the edge gets what forward does not read of a batch, here 'labels'",
        ),
        (
            pictures(0),
            {"loss": "tests.models.own_models:two_losses"},
            "two_losses fails: .*'labels'",
        ),
    ],
)
def test_a_loss_that_cannot_be_computed_is_refused(
    example: dict[str, Tensor], choices: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        SplitModel(own_models.VisionTransformer(), example=example, **choices)


def test_a_batch_is_a_mapping_or_a_pair() -> None:
    inputs, labels = texts(0).values()
    assert as_batch((inputs, labels)) == {"inputs": inputs, "labels": labels}
    with pytest.raises(ModelError, match="a pair of inputs and labels, got tuple"):
        as_batch((inputs, labels, labels))
    with pytest.raises(ModelError, match="'names' of the batch is a list, not a tensor"):
        as_batch({"inputs": inputs, "names": ["a"]})


def test_batches_unlike_the_example_are_refused() -> None:
    _, split_model = live(own_models.VisionTransformer, pictures)
    embedding = split_model.splitter.build_embedding(split_model.weights())
    with pytest.raises(ModelError, match=r"cannot read inputs of shape \{'x': \(2, 3, 8, 8\)\}"):
        embedding({"x": torch.zeros(2, 3, 8, 8)})
    with pytest.raises(ModelError, match="the batch has no tensor 'inputs'"):
        _, texts_model = live(own_models.TextClassifier, texts)
        texts_model.splitter.build_embedding(texts_model.weights())({"tokens": torch.zeros(1)})


@pytest.mark.parametrize(
    "text",
    [
        '{"build": 1}',
        '{"build": "a", "more": 1}',
        '{"build": "a"}',
        '{"build": "a", "before": [1]}',
        '{"build": "a", "tied": ["a"]}',
        '{"build": "a", "tied": 1}',
    ],
)
def test_a_description_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="the description of a model cannot be read"):
        splitter_of(text)


def test_unsplit_training_is_the_same() -> None:
    model, split_model = live(own_models.VisionTransformer, pictures)
    splitter, weights = split_model.splitter, split_model.weights()
    steps = [cut_up(pictures(1), (4, 2))]
    _, whole = train_whole(splitter, weights, steps, SGD)
    by_hand(model, hand_loss, [pictures(1)], adamw=False)
    assert_near(whole, dict(model.state_dict()))


def test_labels_that_do_not_count_do_not_weigh_in_the_default_loss() -> None:
    """One micro-batch has none that counts: its mean alone would be NaN."""
    model, split_model = live(own_models.VisionTransformer, pictures)
    step = pictures(1)
    step["labels"][:4] = -100
    weights = {key: tensor.clone() for key, tensor in split_model.weights().items()}
    steps = [cut_up(step, CUTS[1].micro_batches)]
    losses, split = train_split(split_model.splitter, weights, CUTS[1], steps, SGD)
    assert losses == near(tuple(by_hand(model, hand_loss, [step], adamw=False)))
    assert_near(split, dict(model.state_dict()))


def test_what_the_user_froze_stays() -> None:
    model = own_models.VisionTransformer()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad = False
    splitter = SplitModel(model, example=pictures(0)).splitter
    assert "layers.0.ln_1.weight" in splitter.constant_keys
    segment = splitter.build_segment(0, 1, splitter.select_travelling(model.state_dict()))
    assert not any(parameter.requires_grad for parameter in segment.parameters())


@pytest.mark.parametrize("kind", [own_models.Probes, own_models.LearnsAbove])
def test_what_forward_keeps_from_learning_stays(kind: type[nn.Module]) -> None:
    model, split_model = live(kind, pictures)
    weights = {key: tensor.clone() for key, tensor in split_model.weights().items()}
    splitter = splitter_of(split_model.spec.to_json())
    steps = [pictures(seed) for seed in (1, 2)]
    cut_steps = [cut_up(step, CUTS[1].micro_batches) for step in steps]
    losses, split = train_split(splitter, weights, CUTS[1], cut_steps, CALM)
    assert losses == near(tuple(by_hand(model, hand_loss, steps, adamw=True)))
    assert_near(split, dict(model.state_dict()))
    assert torch.equal(split["layers.0.ln_1.weight"], weights["layers.0.ln_1.weight"])
    assert not torch.equal(split["head.weight"], weights["head.weight"])


def test_what_a_head_on_a_librarys_body_keeps_from_learning_stays() -> None:
    ids = {"input_ids": torch.randint(3, 50, (6, 8)), "labels": torch.arange(6) % 3}
    model = own_models.ProbesText(own_models.bert_config())
    for given in ({"batch_size": 6, "length": 8}, {"example": ids}):
        splitter = SplitModel(model, **given).splitter
        body = {key for key in splitter.all_keys() if key.startswith("bert.")}
        assert splitter.constant_keys >= body and "classifier.weight" not in splitter.constant_keys
    usual = SplitModel(own_models.TwoHeads(own_models.bert_config()), batch_size=6, length=8)
    assert not usual.splitter.constant_keys.intersection(usual.keys)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (own_models.Skips, r"after its blocks reads a tensor made from 'conv_proj\.bias'"),
        (own_models.CollectsStates, "after its blocks reads the result of block 0"),
        (own_models.Repeats, "are one parameter, and blocks may share none"),
        (own_models.SharesHalf, "are one parameter, and blocks may share none"),
        (own_models.Decides, "branches on values of the batch"),
        (own_models.Interferes, "something happens between its blocks 0 and 1"),
        (own_models.DrawsUnseen, r"random numbers \(normal_\) that cannot be seeded"),
    ],
)
def test_a_model_that_cannot_be_cut_says_why(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(ModelError, match=f"{kind.__name__} cannot be split: .*{reason}") as caught:
        SplitModel(kind(), example=pictures(0))
    assert "\n" not in str(caught.value)


def test_blocks_that_read_something_learned_are_refused() -> None:
    with pytest.raises(ModelError, match="'bias'"):
        SplitModel(own_models.LearnsBias(), example=(torch.randn(6, 4, 32), torch.zeros(6).long()))


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8), torch.zeros(6).long()


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ("", "3 lists of equal blocks.*name one by blocks="),
        ("narrows", "block 0 changes the shape of hidden states"),
        ("nothing", "blocks='nothing' is not a list of blocks"),
    ],
)
def test_the_list_of_blocks_must_be_clear(blocks: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        SplitModel(own_models.ResidualNetwork(), example=numbers(), blocks=blocks)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no list of equal blocks"):
        SplitModel(own_models.NoBlocks(), example=numbers())


@pytest.mark.parametrize(
    ("model", "choices", "reason"),
    [
        (3, {}, "needs an nn.Module, got 3"),
        (dict, {}, "needs an nn.Module, got the class dict"),
        (own_models.makes_a_number, {}, "must return an nn.Module, got int"),
        (lambda: nn.Linear(1, 1), {}, "stands in a function or lambda"),
        (own_models.NeedsSize, {"arguments": {"size": torch.ones(1)}}, "must be JSON"),
        (own_models.NeedsSize, {}, "cannot be built: .*size"),
        (own_models.NeedsSize(3), {}, r"pass SplitModel\(NeedsSize, arguments="),
        (own_models.VisionTransformer(blocks=2), {}, "build another one, .* instead of missing"),
        (own_models.narrow(), {}, "float32 .* instead of bfloat16"),
        (nn.DataParallel(own_models.NoBlocks()), {}, r"pass model\.module"),
        (nn.Sequential(nn.LazyLinear(3)), {}, r"'0\.weight' of Sequential has no shape yet"),
        (own_models.NoBlocks().to("meta"), {}, "'one.weight' of NoBlocks is on the meta device"),
        (own_models.NoBlocks(), {"arguments": {}}, "arguments belong to what builds"),
    ],
)
def test_what_cannot_be_built_elsewhere_is_refused(
    model: Any, choices: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        SplitModel(model, example=numbers(), **choices)


def test_a_live_model_of_the_library_keeps_its_record() -> None:
    model = own_models.BertForSequenceClassification(own_models.bert_config())
    model.bert.embeddings.requires_grad_(False)
    split_model = SplitModel(model, batch_size=8, length=16)
    splitter = split_model.splitter
    assert split_model.spec.model_class == "" and splitter.has_record
    assert (split_model.batch_size, split_model.shape.source_length) == (8, 16)
    assert "bert.embeddings.word_embeddings.weight" in splitter.constant_keys
    embedding = splitter.build_embedding(split_model.weights())
    assert not any(parameter.requires_grad for parameter in embedding.parameters())


def test_a_live_own_head_is_called_as_its_user_does() -> None:
    model = own_models.TwoHeads(own_models.bert_config())
    split_model = SplitModel(
        model, batch_size=8, length=16, loss=own_models.two_losses, weight="sample_weight"
    )
    assert split_model.spec.model_class == "tests.models.own_models:TwoHeads"
    assert split_model.spec.loss == "tests.models.own_models:two_losses"
    with pytest.raises(ModelError, match=r"AllStates cannot be split: .*output_hidden_states"):
        SplitModel(own_models.AllStates(own_models.bert_config()), batch_size=8, length=16)


def test_a_module_around_a_body_of_the_library_is_cut() -> None:
    """Whether its blocks get a mask depends on whether there is padding."""
    torch.manual_seed(4)
    model = own_models.Wrapped()
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 50, (6, 8), generator=random)
    mask = torch.ones(6, 8, dtype=torch.long)
    full = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(6) % 3}
    mask = mask.clone()
    mask[0, 4:] = 0
    padded = {**full, "attention_mask": mask}
    splitter = SplitModel(model, example=full).splitter
    weights = {k: t.clone() for k, t in splitter.select_travelling(model.state_dict()).items()}
    steps = [cut_up(full, (3, 3)), cut_up(padded, (3, 3))]
    losses, split = train_split(splitter, weights, CUTS[1], steps, CALM)

    def loss_of(model: Any, step: Mapping[str, Tensor]) -> Tensor:
        logits = model(step["input_ids"], step["attention_mask"])
        return functional.cross_entropy(logits, step["labels"])

    assert losses == near(tuple(by_hand(model, loss_of, [full, padded], adamw=True)))
    assert_near(splitter.whole_state(split), dict(model.state_dict()), depth=2)


def test_tied_keys_of_a_live_model_come_back() -> None:
    _, split_model = live(own_models.Decoder, writings)
    assert split_model.aliases == {"out.weight": "embed.weight"}
    whole = split_model.splitter.whole_state(split_model.weights())
    assert list(whole) == list(split_model.model.state_dict())
    with pytest.raises(ModelError, match=r"lack 'embed\.weight'"):
        split_model.splitter.select_travelling({})


def test_an_example_is_asked_for() -> None:
    with pytest.raises(ModelError, match=r"example=next\(iter\(loader\)\)"):
        SplitModel(own_models.VisionTransformer())


def test_the_length_of_texts_is_asked_for_where_the_example_does_not_tell_it() -> None:
    model = own_models.BertForSequenceClassification(own_models.bert_config())
    with pytest.raises(ModelError, match="needs the length of texts in tokens, such as length=128"):
        SplitModel(model, example=tuple(texts(0).values()))


def test_a_class_within_a_function_is_refused() -> None:
    class Inner(own_models.VisionTransformer):
        pass

    with pytest.raises(ModelError, match="move it to the top of a module of your app"):
        SplitModel(Inner(), example=pictures(0))


@pytest.mark.parametrize("name", ["hidden", "grad", "tokens", "rows"])
def test_a_tensor_of_a_batch_may_bear_any_name(name: str) -> None:
    model = own_losses.Net()
    batches = [features(seed) | {name: 1.0 + torch.rand(6)} for seed in range(2)]
    split_model = SplitModel(
        model, example=batches[0], blocks="blocks", inputs=["x"], loss=own_losses.weighed
    )
    splitter, weights = split_model.splitter, split_model.weights()
    steps = [cut_up(batch, (4, 2)) for batch in batches]
    losses, trained = train_split(splitter, weights, CUTS[1], steps, SGD)
    whole_losses, whole = train_whole(splitter, weights, [[b] for b in batches], SGD)
    assert losses == near(whole_losses)
    assert_near(trained, whole)


def test_modules_with_parametrizations_are_cut() -> None:
    batch = features(0)
    model = own_losses.WeightNormed()
    split_model = SplitModel(model, example=batch, blocks="blocks")
    splitter, weights = split_model.splitter, split_model.weights()
    losses, trained = train_split(splitter, weights, CUTS[1], [cut_up(batch, (4, 2))], SGD)
    whole_losses, whole = train_whole(splitter, weights, [[batch]], SGD)
    assert losses == near(whole_losses)
    assert_near(trained, whole)
