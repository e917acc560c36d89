"""A host of model parts does without libraries that it has no use for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from collapipe_flwr.host.daemon import UNUSED_LIBRARIES, hide_unused_libraries
hide_unused_libraries()
import collapipe_flwr.host.servicer, collapipe_flwr.host.service
import collapipe_flwr.transport.client, collapipe_flwr.models.splitter
from transformers.generation import GenerationMixin
import transformers.models.bert.modeling_bert, transformers.models.llama.modeling_llama
print(*UNUSED_LIBRARIES)
print(*{name.partition(".")[0] for name, module in sys.modules.items() if module})
"""


@pytest.mark.long
def test_a_hosted_segment_loads_neither_flower_nor_data_nor_solver_nor_what_is_hidden() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    hidden, loaded = (set(line.split()) for line in done.stdout.splitlines())
    assert "scipy" in hidden
    assert {"torch", "transformers", "grpc"} <= loaded
    others = {"flwr", "flwr_datasets", "datasets", "cvxpy", "pandas", "sacrebleu"}
    assert not loaded & (hidden | others)
