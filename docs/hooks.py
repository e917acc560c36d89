"""What the site does beyond MkDocs: links to files outside ``docs/``.

Pages link to other files of the repository by relative paths, which work where the repository is
browsed. On the site, such a file is published below ``project/`` and links point there. A link to
a folder becomes plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
PROJECT = "project/"
PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:class|func|meth|mod|data):(?=<code>)")


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's own pages, and every file outside ``docs/`` that a page links to."""
    for path in PAGES:
        files.append(_published(path, config, InclusionLevel.INCLUDED))
    linked = {path for page in files.documentation_pages() for path in _outside(page)}
    for path in sorted(linked - set(PAGES)):
        files.append(_published(path, config, InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave ``docs/`` to where the site has them."""
    return _LINK.sub(lambda match: _rewritten(match, page.file.src_uri), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the role markers of docstrings: ``:class:`` before a name."""
    return _ROLE.sub("", html)


def _published(path: str, config: Any, inclusion: InclusionLevel) -> File:
    file = File.generated(config, PROJECT + path, abs_src_path=str(ROOT / path))
    file.inclusion = inclusion
    return file


def _outside(page: File) -> Iterator[str]:
    for match in _LINK.finditer(page.content_string):
        target = _target(match[2], page.src_uri)
        if not target.startswith("docs/") and (ROOT / target).is_file():
            yield target


def _target(link: str, src_uri: str) -> str:
    """The path in the repository that a link on a page of the site means."""
    inside = src_uri.startswith(PROJECT)
    origin = src_uri.removeprefix(PROJECT) if inside else f"docs/{src_uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _rewritten(match: re.Match[str], src_uri: str) -> str:
    text, link, anchor = match[1], match[2], match[3] or ""
    target = _target(link, src_uri)
    if (ROOT / target / "index.md").is_file():
        target += "/index.md"
    elif (ROOT / target).is_dir():
        return text
    site = target.removeprefix("docs/") if target.startswith("docs/") else PROJECT + target
    return f"[{text}]({os.path.relpath(site, posixpath.dirname(src_uri) or '.')}{anchor})"
