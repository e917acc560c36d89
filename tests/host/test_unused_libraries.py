"""A host of model parts does without libraries that it has no use for."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from threading import Event

import pytest

from collapipe_flwr.host import daemon
from collapipe_flwr.host.daemon import HostSettings, serve

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


def test_a_module_of_the_user_may_import_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = ("metrics_library", "plotting_library")
    for name in libraries:
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "task_with_metrics.py").write_text("import metrics_library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(daemon, "UNUSED_LIBRARIES", libraries)
    monkeypatch.setattr(daemon, "configure_malloc", lambda: None)
    monkeypatch.setattr(daemon, "stop_on_signals", lambda: nullcontext(Event()))

    def leave(address: str) -> None:
        del address
        assert import_module("plotting_library")  # as a loss may when it is called
        raise SystemExit

    settings = HostSettings(
        listen="127.0.0.1:0",
        name="d",
        imports=("task_with_metrics",),
    )
    with pytest.raises(SystemExit):
        serve(settings, passes_on=True, announce=leave)
