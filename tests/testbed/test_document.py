"""`make test-cluster`: docs/deploy.md, by hand, carried out to the letter, its promises tried.

Nine machines with the names and addresses of the page train on a file over shaped links. In
round 2 a device dies for good, in round 3 the edge dies and comes back, in round 4 a device is
stopped in good order.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from collapipe_flwr.data.seq2seq import NUMBERS, spell
from tests.testbed.by_the_document import (
    ADDRESSES,
    DEVICES,
    LEVEL,
    PAGE,
    PLACES,
    DocumentedDeployment,
)
from tests.testbed.deployment import environment
from tests.testbed.document import blocks_of
from tests.testbed.machines import machines
from tests.testbed.namespaces import namespaces, namespaces_allowed
from tests.testbed.processes import programs
from tests.testbed.rounds import (
    RATE_BIT_PER_S,
    ROUND_S,
    RUN,
    first_amid_steps,
    planned,
    wait_for_round,
)

GREENHOUSE, WORKSHOP = DEVICES[:3], DEVICES[3:]
WORDS = "/opt/collapipe/words.jsonl"


def test_every_command_of_the_page_is_run() -> None:
    blocks = blocks_of(PAGE, LEVEL)
    assert {block.section for block in blocks} == {1, 2, 3, 4, 5, 6}
    commands = [block for block in blocks if block.language == "bash"]
    assert {block.place for block in commands} == set(PLACES)


@contextmanager
def deployed(folder: Path) -> Iterator[DocumentedDeployment]:
    env = environment(folder)
    del env["FLWR_HOME"]  # the page says where Flower's things are
    env["HOME"] = "/root"
    env["OMP_NUM_THREADS"] = "1"  # nine boards share the cores of one machine
    with (
        namespaces(list(ADDRESSES), rate_bit_per_s=RATE_BIT_PER_S, addresses=ADDRESSES) as network,
        machines(network, list(ADDRESSES), folder / "machines", env) as found,
        programs(network, folder, env) as running,
    ):
        for name in ("server", "cu-greenhouse", "cu-workshop"):
            write = found[name].enter(f"cat > {WORDS}")
            subprocess.run(write, input=_words(), text=True, check=True, timeout=60)
        yield DocumentedDeployment(
            network=network,
            machines=found,
            programs=running,
            folder=folder,
            env=env,
            more={**RUN, "run-name": "run", "data.task": "translation", "data.train": WORDS},
        )


def _words() -> str:
    rows = ({"source": spell(n), "target": str(n)} for n in range(0, NUMBERS, 40))
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.cluster
@pytest.mark.timeout(1500)
def test_the_page_deploys_and_the_deployment_lives_through_failures(tmp_path: Path) -> None:
    if not namespaces_allowed():
        pytest.skip("network namespaces need root, ip and tc; test_deployment.py does without")
    (tmp_path / "machines").mkdir()
    with deployed(tmp_path) as deployment:
        deployment.start()
        run, network = deployment.run(), deployment.network
        wait_for_round(deployment, run, 1)
        victim = first_amid_steps(network, GREENHOUSE)
        deployment.machines[victim].kill("collapipe-device")
        wait_for_round(deployment, run, 2)
        first_amid_steps(network, ["edge"])
        deployment.machines["edge"].kill("collapipe-edge")
        deployment.systemctl("start", "collapipe-edge", "edge")
        wait_for_round(deployment, run, 3)
        stopped = first_amid_steps(network, WORKSHOP)
        deployment.systemctl("stop", "collapipe-device", stopped)
        assert deployment.machines[stopped].service("collapipe-device", "rc") == "0"
        assert run.wait(deadline_s=2 * ROUND_S) == 0, run.tail()
        summary, events = deployment.summary(), deployment.events()
    assert summary["status"] == "completed", run.tail(60)
    assert f"greenhouse/{victim}" in planned(events[1])
    lost = f"lost greenhouse/{victim}"
    assert any(lost in sentence for sentence in events[1]["failures"]), run.tail(60)
    assert all(f"greenhouse/{victim}" not in planned(event) for event in events[2:])
    assert any("replayed" in sentence for sentence in events[2]["failures"]), run.tail(60)
    assert len(events[3]["plan"]["clusters"]) == len(events) / 2 == 2
    late = [sentence for sentence in events[3]["failures"] if "workshop" not in sentence]
    assert not late, run.tail(60)  # its cluster may notice, where a round takes beyond the grace
