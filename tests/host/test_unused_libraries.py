"""A host of model parts does without libraries that it has no use for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from collapipe_flwr.host.daemon import UNUSED_LIBRARIES, hide_unused_libraries
hide_unused_libraries()
import collapipe_flwr.models.splitter
from transformers.generation import GenerationMixin
import transformers.models.bert.modeling_bert, transformers.models.llama.modeling_llama
loaded = [name for name, module in sys.modules.items() if module]
print(*[name for name in loaded if name.partition(".")[0] in UNUSED_LIBRARIES])
"""


@pytest.mark.long
def test_models_load_without_the_unused_libraries() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
