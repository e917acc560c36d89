"""Console output of a run: each round, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from textwrap import shorten, wrap
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from collapipe_flwr.reporting.events import (
    KEPT_FROM,
    RoundEvent,
    control_unit_role,
    describe_share_cap,
    describe_spared,
    holders,
    is_early,
)
from collapipe_flwr.reporting.output import PlainTable, format_count, terminal

_WIDTH = 118
_LEAST_WIDTH, _MOST_LINES = 16, 6  # of what is folded
_MORE = " ... (more in events.jsonl)"
_MOST_ROWS = {"link": 2, "budget": 4, "peak": 3}  # in the table at the end
_MOST_CHARS = 120  # of a line in a pipe, where no terminal folds it
_MOST_PLANS = 3  # of a round's clusters
_RATE = " Mbit/s"
_SO_FAR = ", above so far"
_LINKS = {"d2d": "device to device", "d2e": "to edge", "flower": "Flower"}
_MOST_ROUNDS = 8  # of one cluster that are named

Row = tuple[str, str | Text]


class ProgressPrinter:
    """Prints lines for each finished round: numbers, then plans, wrapped on a terminal."""

    def __init__(self, rounds: int | None = None, console: Console | None = None) -> None:
        self.rounds = rounds
        self._console = console or terminal(width=_WIDTH, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line, wrapped on a terminal."""
        if self._console.is_terminal:
            indent, width = " " * (len(text) - len(text.lstrip())), self._console.width
            folded = wrap(
                text.strip(),
                max(width, _LEAST_WIDTH),
                initial_indent=indent,
                subsequent_indent=f"{indent}    ",
                max_lines=_MOST_LINES,
                placeholder=_MORE if width > len(_MORE) + len(indent) + 4 else " ...",
            )
            text = "\n".join(folded)
        self._console.print(text, soft_wrap=True)

    def show_untrained(self, metrics: Mapping[str, float]) -> None:
        words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"untrained: {words}")

    def show(self, event: RoundEvent) -> None:
        loss = "-" if event.loss is None else f"{event.loss:.4f}"
        scores = "  ".join(f"test {name} {value:.4g}" for name, value in event.metrics.items())
        numbers = f"round {event.round_index:>3}/{self.rounds or '?'}  {event.wall_s:5.1f} s"
        clusters = ""
        if event.clusters_loss is not None:
            found = "".join(f"  {name} {v:.4g}" for name, v in event.clusters_metrics.items())
            clusters = f"clusters' test loss {event.clusters_loss:.4g}{found}"
        fresh = ""
        if event.prequential_loss is not None:
            fresh = f"{event.fresh_examples} fresh, loss before {event.prequential_loss:.4f}"
        self.say("  ".join(filter(None, (numbers, fresh, f"train loss {loss}", scores, clusters))))
        queue = ""
        if event.queues_j:
            queue = f"energy queue at most {max(0.0, *event.queues_j.values()):.2g} J"
        if took := " | ".join(filter(None, (_took_text(event), queue))):
            self.say(f"    {took}")
        for plan in _plan_lines(event.plan):
            if not self._console.is_terminal:
                plan = shorten(plan, _MOST_CHARS - len("    "))
            self.say(f"    {plan}")
        for failure in event.failures:
            self.say(f"    lost: {failure}")


def _plan_lines(plan: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield ``plan A pi5+pi4:0-3 nano:4-5 8x4 fp32-int8``: blocks, micro-batches, codecs.

    Of many clusters, those after the first are a number.
    """
    clusters = () if plan is None else plan["clusters"]
    for cluster in clusters[:_MOST_PLANS]:
        words = ["plan", cluster["cluster_id"]]
        for segment in cluster["segments"]:
            devices = "+".join(name.rpartition("/")[2] for name in holders(segment))
            words.append(f"{devices}:{segment['first_block']}-{segment['stop_block'] - 1}")
        if edge := cluster.get("edge"):
            words.append(f"edge {edge}")
        words.append(f"{cluster['micro_batch_size']}x{cluster['micro_batches']}")
        codecs = [hop["codec"] for hop in cluster.get("hops", ())]
        if not set(codecs) <= {"fp32"}:
            words.append("-".join(codecs))
        yield " ".join(words)
    if (left := len(clusters) - _MOST_PLANS) > 0:
        yield f"and {format_count(left, 'plan')} more in events.jsonl"


def _took_text(event: RoundEvent) -> str:
    """Say ``predicted 3.10, took 3.30 simulated seconds``; ``seconds`` if machines timed it."""
    if event.plan is None:
        return ""
    numbers = {"predicted": event.plan["latency_s"], "took": event.latency_s}
    shown = (f"{name} {s:.2f}" for name, s in numbers.items() if s is not None)
    timed = any(cluster["measured"] for cluster in event.clusters.values())
    return f"{', '.join(shown)} {'seconds' if timed else 'simulated seconds'}"


def summary_table(summary: Mapping[str, Any], *, folds: bool = False) -> Table:
    """Build the table at the end of a run; fits 24 lines, unless cells wrap (``folds``)."""
    table = PlainTable(show_header=False).set_title(f"run {summary['status']}")
    table.box, table.padding = None, (0, 2, 0, 0)
    for _ in range(2):
        table.add_column(no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    for row in (*_outcome_rows(summary), *_machine_rows(summary)):
        table.add_row(*row)
    return table


def _outcome_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    metric = summary["metric"]
    curve = f"{_number(metric['initial'])} -> {_number(metric['final'])}"
    yield metric["name"], f"{curve} on unseen examples"
    if found := summary.get("clusters"):
        yield "found by clusters", "  ".join(f"{name} {_number(v)}" for name, v in found.items())
    asked = summary.get("rounds_asked")
    done = f"{summary['rounds']} of {asked}" if asked else str(summary["rounds"])
    yield "rounds", f"{done} in {summary['wall_s']:.0f} s"
    if lost := summary.get("lost"):
        count = len({index for rounds in lost.values() for index in rounds})
        names = ", ".join(f"{name} ({_first(rounds)})" for name, rounds in lost.items())
        yield "lost", f"{format_count(count, 'round')} went on without a cluster: {names}"
    if never := summary.get("never_trained"):
        reasons = ": events.jsonl has the reasons"
        yield "never trained", Text.assemble((_first(never), "red"), reasons)
    if (error := summary.get("prediction_error")) is not None:
        yield "predictions", f"off by {100 * error:.1f} % of a round in the median"
    links = summary["bytes"]
    sizes = ", ".join(f"{name} {links[kind] / 1e6:.0f}" for kind, name in _LINKS.items())
    yield "traffic in MB", sizes
    if moved := links.get("weights", 0) + links.get("spared", 0):
        spared = links["spared"] / 1e6
        yield "segments", f"{moved / 1e6:.1f} MB, {spared:.1f} MB of it there already"
    if kept := summary.get("spared"):
        yield "frozen blocks", describe_spared(kept)


def _machine_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the most telling rows of links, energy and memory, and the number of the others."""
    if share := summary.get("model_share"):
        most = f"{100 * share['most']:.3g} % of the whole model"
        yield "planned peak of a device", f"{most}{describe_share_cap(share)}"
    links = sorted(summary.get("links", ()), key=_slowest_bit_per_s)
    peaks = sorted(summary["peak_memory_bytes"].items(), key=lambda item: -item[1])
    roles = _roles(summary)
    allowed = {roles.get(n, n): size for n, size in summary.get("memory_limit_bytes", {}).items()}
    kinds: dict[str, list[Row]] = {
        "link": [_link_row(link) for link in links],
        "budget": _energy_rows(summary, roles),
        "peak": [(f"memory {name}", _peak_text(size, allowed.get(name))) for name, size in peaks],
    }
    for kind, rows in kinds.items():
        yield from rows[: _MOST_ROWS[kind]]
    if any(str(text).endswith(_SO_FAR) for _, text in kinds["budget"]):
        yield "budgets", f"hold from {KEPT_FROM} rounds on: what is above them is paid back"
    left = {kind: len(rows) - _MOST_ROWS[kind] for kind, rows in kinds.items()}
    words = [format_count(count, kind) for kind, count in left.items() if count > 0]
    if words:
        yield "more", f"{', '.join(words)} in summary.json"


def _roles(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the control units of the last plan by id, see `control_unit_role`."""
    clusters = (summary.get("plan") or {}).get("clusters", ())
    return {id_: role for each in clusters for id_, role in control_unit_role(each).items()}


def _peak_text(size: int, allowed: int | None) -> str:
    of = f" of {allowed / 1e6:.1f} MB allowed" if allowed else " MB"
    return f"measured peak {size / 1e6:.1f}{of}"


def _energy_rows(summary: Mapping[str, Any], roles: Mapping[str, str]) -> list[Row]:
    """List devices by the share of their budget that they spent; red if over budget.

    Budgets are long-term: what is above them after a few rounds, a longer run pays back.
    """
    budgets, used = summary["energy"]["budget_j"], summary["energy"]["mean_j"]
    early = is_early(summary["rounds"], (summary.get("plan") or {}).get("policy"))
    shares = {name: used.get(name, 0.0) / b if b else 0.0 for name, b in budgets.items()}
    rows = list[Row]()
    for device in sorted(shares, key=lambda name: -shares[name]):
        used_j, budget_j = used.get(device, 0.0), budgets[device]  # a budget of None: no limit
        limit = "" if budget_j is None else f" of {budget_j:.3g}"
        text = Text(f"{used_j:.3g}{limit} J per round")
        if shares[device] > 1.0:
            text += Text(_SO_FAR) if early else Text(", over budget")
            text.style = "" if early else "red"
        rows.append((f"energy {roles.get(device, device)}", text))
    return rows


def _link_row(link: Mapping[str, Any]) -> Row:
    """Format a hop with its codec and the rates there and back."""
    ends = " > ".join(str(link[end]).rpartition("/")[2] for end in ("sender", "receiver"))
    there, back = (_way_text(link[way]) for way in ("forward", "backward"))
    there = there.removesuffix(_RATE) if back.endswith(_RATE) else there
    return f"link {link['cluster']} {ends}", f"{link['codec']}  there {there}, back {back}"


def _slowest_bit_per_s(link: Mapping[str, Any]) -> float:
    rates = (link[way]["bit_per_s"] for way in ("forward", "backward"))
    return min((rate for rate in rates if rate is not None), default=inf)


def _way_text(way: Mapping[str, Any]) -> str:
    if way["bit_per_s"] is None:
        return f"{way['bytes'] / 1e6:.1f} MB"
    planned = way["planned_bit_per_s"]
    of = "" if planned is None else f" of {planned / 1e6:.3g}"
    return f"{way['bit_per_s'] / 1e6:.3g}{of}{_RATE}"


def _first(items: Sequence[object]) -> str:
    """Join as ``3, 5``; a long list is cut short."""
    shown = ", ".join(map(str, items[:_MOST_ROUNDS]))
    more = len(items) - _MOST_ROUNDS
    return f"{shown}, {more} more" if more > 0 else shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
