"""Console output of a run: each round, and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.table import Table

from collapipe_flwr.reporting.events import RoundEvent

_WIDTH = 118
_LEAST_WIDTH, _MOST_LINES = 40, 6  # of what is folded
_MOST_LINKS = 4  # in the table at the end, which is to fit a screen
_MOST_ROWS = 6  # there, of one kind: those that say most
_MOST_ROUNDS = 8  # of one cluster that are named


class RoundPrinter:
    """Prints two lines per finished round: numbers and plan.

    On a terminal no line is wider than it; elsewhere lines are as long as they are.
    """

    def __init__(self, rounds: int | None = None, console: Console | None = None) -> None:
        self.rounds = rounds
        self._console = console or Console(width=_WIDTH, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """One plain line, folded where a terminal ends."""
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        indent = " " * (len(text) - len(text.lstrip()))
        folded = wrap(
            text.strip(),
            max(self._console.width, _LEAST_WIDTH),
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            max_lines=_MOST_LINES,
            placeholder=" ... (all of it is in events.jsonl)",
        )
        self._console.print("\n".join(folded), markup=False, highlight=False, soft_wrap=True)

    def show_untrained(self, metrics: Mapping[str, float]) -> None:
        """What the model scores before the first round."""
        words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"untrained: {words}")

    def show(self, event: RoundEvent) -> None:
        """One round: what was learned, then where."""
        loss = "-" if event.loss is None else f"{event.loss:.4f}"
        scores = "  ".join(f"test {name} {value:.4g}" for name, value in event.metrics.items())
        numbers = f"round {event.round_index:>3}/{self.rounds or '?'}  {event.wall_s:5.1f} s"
        clusters = _clusters_text(event)
        fresh = ""
        if event.prequential_loss is not None:
            fresh = f"{event.fresh_examples} fresh, loss before {event.prequential_loss:.4f}"
        self.say("  ".join(filter(None, (numbers, fresh, f"train loss {loss}", scores, clusters))))
        queue = ""
        if event.queues_j:
            queue = f"| energy queue at most {max(event.queues_j.values()):.2g} J"
        if plan := "  ".join(filter(None, (_plan_text(event.plan), _took_text(event), queue))):
            self.say(f"    {plan}")
        for failure in event.failures:
            self.say(f"    lost: {failure}")


def _clusters_text(event: RoundEvent) -> str:
    """``clusters' test loss 0.4  accuracy 0.8``; nothing where they were not asked."""
    if event.clusters_loss is None:
        return ""
    scores = "".join(f"  {name} {value:.4g}" for name, value in event.clusters_metrics.items())
    return f"clusters' test loss {event.clusters_loss:.4g}{scores}"


def _plan_text(plan: Mapping[str, Any] | None) -> str:
    """``plan A pi5:0-3 nano:4-5 8x4 | B ... | predicted 3.1 s``: blocks, micro-batches."""
    if plan is None:
        return ""
    clusters = []
    for cluster in plan["clusters"]:
        segments = " ".join(
            f"{_devices_text(s)}:{s['first_block']}-{s['stop_block'] - 1}"
            for s in cluster["segments"]
        )
        clusters.append(
            f"{cluster['cluster_id']} {segments} "
            f"{cluster['micro_batch_size']}x{cluster['micro_batches']}{_codecs_text(cluster)}"
        )
    return "plan " + " | ".join(clusters) + f" | predicted {plan['latency_s']:.2f} s"


def _devices_text(segment: Mapping[str, Any]) -> str:
    """``pi5``, or ``pi5+nano`` where they are replicas; plans of earlier versions have none."""
    names = (segment["device_id"], *segment.get("replicas", ()))
    return "+".join(name.rpartition("/")[2] for name in names)


def _took_text(event: RoundEvent) -> str:
    """``took 3.3 s``; nothing where nobody knows."""
    if event.plan is None or event.latency_s is None:
        return ""
    timed = any(cluster["measured"] for cluster in event.clusters.values())
    return f"{'took' if timed else 'simulated'} {event.latency_s:.2f} s"


def _codecs_text(cluster: Mapping[str, Any]) -> str:
    """`` fp32-int8-int8``, hop by hop; nothing where all are exact."""
    codecs = [hop["codec"] for hop in cluster.get("hops", ())]
    return "" if set(codecs) <= {"fp32"} else " " + "-".join(codecs)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The end of a run at a glance."""
    table = Table(title=f"run {summary['status']}", show_header=False, title_justify="left")
    metric = summary["metric"]
    initial, final = metric["initial"], metric["final"]
    table.add_row(metric["name"], f"{_number(initial)} -> {_number(final)} on unseen examples")
    if found := summary.get("clusters"):
        words = "  ".join(f"{name} {_number(value)}" for name, value in found.items())
        table.add_row("found by clusters", words)
    asked = summary.get("rounds_asked")
    done = f"{summary['rounds']} of {asked}" if asked else str(summary["rounds"])
    table.add_row("rounds", f"{done} in {summary['wall_s']:.0f} s")
    if lost := summary.get("lost"):
        table.add_row("lost", _lost_text(lost))
    if (error := summary.get("prediction_error")) is not None:
        table.add_row("predictions", f"off by {100 * error:.1f} % of a round in the median")
    links = summary["bytes"]
    sizes = ", ".join(f"{name} {links[name] / 1e6:.0f} MB" for name in ("d2d", "d2e", "flower"))
    table.add_row("traffic", sizes)
    if moved := links.get("weights", 0) + links.get("spared", 0):
        spared = links["spared"] / 1e6
        table.add_row("segments", f"{moved / 1e6:.1f} MB, {spared:.1f} MB of it there already")
    reports = summary.get("links", ())
    for link in reports[:_MOST_LINKS]:
        table.add_row(*_link_row(link))
    if len(reports) > _MOST_LINKS:
        table.add_row("links", f"{len(reports) - _MOST_LINKS} more in summary.json")
    _add_rows(table, _energy_rows(summary["energy"]), "energy")
    peaks = sorted(summary["peak_memory_bytes"].items(), key=lambda item: -item[1])
    _add_rows(table, [(f"memory {k}", f"{v / 1e6:.1f} MB peak") for k, v in peaks], "memory")
    return table


def _add_rows(table: Table, rows: Sequence[tuple[str, str]], what: str) -> None:
    """The first rows, and how many there are besides."""
    for row in rows[:_MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > _MOST_ROWS:
        table.add_row(what, f"{len(rows) - _MOST_ROWS} more in summary.json")


def _energy_rows(energy: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Devices by how much of their budget they spent, those that overran it in red."""
    shares, rows = {}, []
    for device, budget_j in energy["budget_j"].items():
        used_j = energy["mean_j"].get(device, 0.0)
        shares[device] = used_j / budget_j if budget_j else 0.0  # None: without a limit
    for device in sorted(shares, key=lambda name: -shares[name]):
        used_j, budget_j = energy["mean_j"].get(device, 0.0), energy["budget_j"][device]
        limit = "" if budget_j is None else f" of {budget_j:.3g}"
        text = f"{used_j:.3g}{limit} J per round"
        over = shares[device] > 1.0
        rows.append((f"energy {device}", f"[red]{text}, over budget[/red]" if over else text))
    return rows


def _link_row(link: Mapping[str, Any]) -> tuple[str, str]:
    """One line of the summary's links: the hop, then codec and rates."""
    ends = " > ".join(str(link[end]).rpartition("/")[2] for end in ("sender", "receiver"))
    ways = " | ".join(_way_text(link[way]) for way in ("forward", "backward"))
    return f"link {link['cluster']} {ends}", f"{link['codec']}  {ways}"


def _way_text(way: Mapping[str, Any]) -> str:
    text = f"{way['bytes'] / 1e6:.1f} MB"
    if way["bit_per_s"] is not None:
        text += f" at {way['bit_per_s'] / 1e6:.4g}"
        if way["planned_bit_per_s"] is not None:
            text += f" of {way['planned_bit_per_s'] / 1e6:.4g}"
        text += " Mbit/s"
    return text


def _lost_text(lost: Mapping[str, Sequence[int]]) -> str:
    """``2 rounds went on without a cluster: A (3, 5), B (5)``; a long list is cut short."""
    count = len({index for rounds in lost.values() for index in rounds})
    names = ", ".join(f"{name} ({_first(rounds)})" for name, rounds in lost.items())
    return f"{count} round{'s' * (count != 1)} went on without a cluster: {names}"


def _first(rounds: Sequence[int]) -> str:
    shown = ", ".join(map(str, rounds[:_MOST_ROUNDS]))
    more = len(rounds) - _MOST_ROUNDS
    return f"{shown}, {more} more" if more > 0 else shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
