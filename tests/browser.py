"""A headless Chromium, where this machine has one; tests that need it are skipped elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZES = {"phone": (360, 780), "laptop": (1280, 800), "wide": (1920, 1080)}
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; skips the test where there is none (`apt-get install chromium`)."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium on this machine: `apt-get install chromium`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How somebody looks at a page; ``said`` collects what its console shows."""

    size: str
    scheme: str = "light"
    offline: bool = True
    said: list[str] = field(default_factory=list)

    @contextmanager
    def page(self, browser: Browser) -> Iterator[Page]:
        """An empty page in a window of its own."""
        width, height = SIZES[self.size]
        phone = self.size == "phone"
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if self.scheme == "dark" else "light",
            has_touch=phone,
            is_mobile=phone,
            offline=self.offline,
        )
        page = context.new_page()
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        try:
            yield page
        finally:
            context.close()

    def open(self, page: Page, path: Path) -> None:
        """Show a report and wait until its charts are drawn."""
        page.goto(path.as_uri())
        page.wait_for_selector("body.drawn")
