"""Pages in a real browser; tests that need one are skipped, visibly, where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZES = {"desktop": (1280, 900), "tablet": (820, 1100), "phone": (390, 844)}


def chromium() -> str:
    """The program; skips the test where it or the library that drives it is missing."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no browser: apt-get install chromium")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of its own process, headless."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page that is open, and what its console said."""

    def __init__(self, browser: Any, size: str = "desktop", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self._context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def close(self) -> None:
        """Close it."""
        self._context.close()
