"""The package as a house: imports go in no circle, a class name means one class."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import collapipe_flwr

ROOT = Path(collapipe_flwr.__file__).parent
TREES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): ast.parse(path.read_text())
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"  # which only pass names on
}


def imported(tree: ast.Module) -> set[str]:
    """The package's modules that one imports, in functions and for type checkers, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{each.name}" for each in node.names)
            found.add(node.module)
    return found & set(TREES)


def test_imports_go_in_no_circle() -> None:
    TopologicalSorter({name: imported(tree) for name, tree in TREES.items()}).prepare()


def test_no_class_name_means_two_classes() -> None:
    nodes = (node for tree in TREES.values() for node in ast.walk(tree))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_has_more_than_500_lines() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > 500} == {}
