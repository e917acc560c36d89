"""Names that may be folders or on the hub: what is decided here, and how the hub is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from collapipe_flwr.core import hub
from collapipe_flwr.core.hub import explain_absent_model, is_folder_only, is_reachable


@pytest.fixture(autouse=True)
def _afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    is_reachable.cache_clear()
    yield
    is_reachable.cache_clear()


@pytest.mark.parametrize("name", ["two words", "-x", "a,b", "x" * 97, "a\\b", "ü*", "a/b/c", "x/"])
def test_what_the_hub_allows_for_no_name_is_a_folder(name: str) -> None:
    assert is_folder_only(name)


@pytest.mark.parametrize("name", ["bert-base-uncased", "owner/model.v1", "owner/data:config:test"])
def test_what_may_be_on_the_hub_is_not(name: str) -> None:
    assert not is_folder_only(name)


def test_a_hub_that_keeps_silent_is_announced_and_given_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, ended = [], threading.Event()

    def wait(endpoint: str, answers: threading.Event) -> None:
        del answers
        asked.append(endpoint)
        ended.wait(60)

    monkeypatch.setattr(hub, "_ask", wait)
    monkeypatch.setattr(hub, "SILENT_S", 0.0)
    monkeypatch.setattr(hub, "LIMIT_S", 0.05)
    Path("model-7").mkdir()
    try:
        for _ in range(2):
            assert "did you mean 'model-7'?" in explain_absent_model("modell-7")
    finally:
        ended.set()
    assert len(asked) == 1 and [*caplog.messages] == [f"waiting for {asked[0]} for up to 0.05 s"]


def test_a_folder_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ask", lambda *_: pytest.fail("asked"))
    Path("model-7").mkdir()
    assert explain_absent_model("model-7") == ""
