"""Reports of one stage add up, and stay small enough for a message."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from collapipe_flwr.core.links import MOST_NOTES, NOTED_FRAMES, FrameLog, LinkTraffic
from collapipe_flwr.core.measurements import MOST_SPANS, Span, StageMeasurement
from tests.pipeline.chains import Chain, Head, make_batch, make_parts, settings


def span(step: int) -> Span:
    return Span(work="forward", step=step, micro_batch=0, start_s=0.0, stop_s=1.0)


def of_stream(stream_id: int) -> StageMeasurement:
    """A stream of many small frames and steps."""
    log = FrameLog(stream_id)
    for index in range(2 * NOTED_FRAMES):
        log.add(float(index), 10)
    arrived = LinkTraffic(notes=log.notes)
    spans = tuple(span(stream_id) for _ in range(MOST_SPANS // 2 + 1))
    return StageMeasurement(name="edge", steps=1, received_up=arrived, spans=spans)


def test_a_sum_keeps_the_first_spans_and_the_last_notes():
    total = of_stream(0)
    for stream_id in range(1, 6):
        total = total + of_stream(stream_id)
    assert total.steps == 6
    assert [s.step for s in total.spans] == [0] * (MOST_SPANS // 2 + 1) + [1] * (
        MOST_SPANS // 2 - 1
    )
    assert len(total.received_up.notes) == MOST_NOTES
    assert {stream_id for stream_id, *_ in total.received_up.notes} == {2, 3, 4, 5}


def test_means_of_norms_are_weighted_by_the_squares_of_labels():
    few = StageMeasurement(name="edge", big_square_norm=4.0, big_squares=1.0, peak_tensor_bytes=7)
    many = StageMeasurement(name="edge", big_square_norm=8.0, big_squares=3.0, peak_tensor_bytes=5)
    total = few + many
    assert (total.big_square_norm, total.big_squares, total.peak_tensor_bytes) == (7.0, 4.0, 7)


def test_a_first_micro_batch_without_labels_leaves_its_mean_alone():
    begun, unlabelled = StageMeasurement(name="edge"), StageMeasurement(name="edge", steps=1)
    labelled = StageMeasurement(name="edge", steps=1, small_square_norm=8.0, small_squares=4.0)
    diverged = replace(labelled, small_square_norm=math.inf)
    for total in (begun + unlabelled + labelled, labelled + unlabelled):
        assert (total.small_square_norm, total.small_squares, total.steps) == (8.0, 4.0, 2)
    assert (unlabelled + diverged).small_square_norm == math.inf


class Calm(Head):
    """Without labels its loss is 0."""

    def forward(self, hidden_BTD, context):
        logits, labels = self.out(hidden_BTD).flatten(0, 1), context["labels"].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return loss / max(self.weight_of(context), 1)


def test_a_stage_counts_steps_whose_first_micro_batch_has_no_label():
    blank, labelled = make_batch((2, 3))
    blank.context["labels"].fill_(-100)
    batch = [replace(blank, weight=0), labelled]
    chain = Chain([*make_parts((1,))[:-1], Calm()], lambda name, *_: settings(name))
    with chain.running() as first:
        first.train_step(batch)
        first.train_step(batch[::-1])
    for report in (stage.report() for stage in chain.stages):
        labels = labelled.weight
        assert (report.steps, report.small_weight, report.small_squares) == (2, labels, labels**2)
        assert (report.big_weight, report.big_squares) == (2 * labels, 2 * labels**2)
        assert report.small_square_norm > 0 and report.big_square_norm > 0
