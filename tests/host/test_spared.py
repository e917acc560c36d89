"""A host of model parts does without libraries that it has no use for."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from collapipe_flwr.host.spared import SPARED, spare_libraries
spare_libraries()
import collapipe_flwr.models.splitter
from transformers.generation import GenerationMixin
import transformers.models.bert.modeling_bert, transformers.models.llama.modeling_llama
print(*[name for name in sys.modules if name.partition(".")[0] in SPARED and sys.modules[name]])
"""


def test_models_load_without_the_spared_libraries() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
