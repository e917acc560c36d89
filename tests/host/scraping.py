"""What a Prometheus server sees of a process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.request import Request, urlopen

Samples = dict[tuple[str, ...], float]


def scrape(address: str) -> Samples:
    """Every sample by name and values of its labels, as OpenMetrics tells it."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    wanted = Request(f"http://{address}/metrics")
    wanted.add_header("Accept", "application/openmetrics-text; version=1.0.0")
    with urlopen(wanted, timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def listening_ports(pid: int) -> set[int]:
    """Of a process, on loopback."""
    inodes = {
        match[1]
        for name in os.listdir(f"/proc/{pid}/fd")
        if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")))
    }
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].partition(":")[2], 16) for row in rows if row[9] in inodes and row[3] == "0A"
    }
