"""A file of ``bench pipeline`` as Markdown, for docs/pipeline.md.

Run as ``python -m collapipe_flwr.benches.recorded FILE``; a test compares the page with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MIB = 2**20
_COLUMNS = ("schedule", "our split", "torch's", "in flight", "torch's", "slow", "codec")
_NUMBERS = ("step s", "torch s", "ratio", "late")
_HEAD = f"| {' | '.join(_COLUMNS + _NUMBERS)} |\n|{'---|' * len(_COLUMNS)}{'---:|' * len(_NUMBERS)}"
_TEXTBOOK = "The same with the textbook's warm-up on both sides:\n"


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of cases, and a paragraph of the single numbers."""
    tables = [f"{_HEAD}\n{_rows(result[key])}\n" for key in ("cases", "textbook_depths")]
    return "\n".join([tables[0], _TEXTBOOK, tables[1], f"{_paragraph(result)}\n"])


def _rows(cases: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"| {' | '.join(_cells(case))} |" for case in cases)


def _cells(case: Mapping[str, Any]) -> tuple[str, ...]:
    slow = "link" if case["link"] != "loopback" else "device" if case["device"] != "equal" else ""
    return (
        *(case["schedule"], case["split"], case["torch_pipelining_split"]),
        *(_in_flight(case[key]) for key in ("depths", "torch_pipelining_depths")),
        *(slow, case["codec"]),
        *(f"{case[key]:.3f}" for key in ("step_s", "torch_pipelining_step_s")),
        *(f"{case[key]:.2f}" for key in ("ratio", "bound_ratio")),
    )


def _in_flight(depths: Sequence[int]) -> str:
    return " ".join(map(str, depths))


def _paragraph(result: Mapping[str, Any]) -> str:
    wire, memory = result["wire"], result["memory"]
    lines = [
        f"A gigabyte moved costs {wire['cpu_s_per_gb']:.2f} CPU seconds, "
        f"{wire['tls_cpu_s_per_gb']:.2f} with mutual TLS.",
        f"A device of {len(memory['device_peaks_bytes'])} peaks at "
        f"{memory['device_peak_bytes'] / _MIB:.0f} MiB, the whole model at "
        f"{memory['whole_model_peak_bytes'] / _MIB:.0f} MiB ({memory['ratio']:.3f}).",
    ]
    if "device_floor_bytes" in memory:
        lines.append(
            f"Its tensors need {memory['device_floor_bytes'] / _MIB:.0f} MiB, "
            f"{memory['device_state_bytes'] / _MIB:.0f} of them weights, gradients and optimiser "
            "state."
        )
    if result["recovery"] is not None:
        seconds = result["recovery"]
        lines.append(
            f"A killed device was noticed after {seconds['detect_s']:.2f} s and training went on "
            f"after {seconds['resume_s']:.2f} s."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
