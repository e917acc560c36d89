"""What a document promises exists: commands, options, run-config keys, names, files and links."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest

import collapipe_flwr
from collapipe_flwr.config.cluster_file import read_cluster
from tests.docs import pages
from tests.docs.pages import PAGES, ROOT, Said

_SPEC = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/reference.py")
assert _SPEC is not None and _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = reference
_SPEC.loader.exec_module(reference)

SECTIONS = "|".join(filter(None, reference.TITLES))
KEY = re.compile(rf"(?<![\w./:-])(?:{SECTIONS})\.[a-z][a-z-]*(?![\w./])")
NAME = re.compile(r"collapipe_flwr(?:\.\w+)+")
SUFFIXES = (".conll", ".csv", ".env", ".json", ".key", ".pem", ".pt", ".py", ".toml")
FILES = re.compile(
    r"(?:tests|examples|benchmarks|deploy|docs)/[\w./-]*\w|(?:[a-z_]+/)+[a-z_0-9]+\.py"
)
CODE_FOLDERS = ("", "collapipe_flwr", "tests", "tests/costs", "tests/scheduler")


def test_code_blocks_parse() -> None:
    for block in pages.blocks("python"):
        ast.parse(block.text, str(block.page))
    for block in pages.blocks("toml"):
        tomllib.loads(block.text)
    for block in pages.blocks("json"):
        json.loads(block.text)


def test_shell_blocks_parse() -> None:
    shown = pages.blocks("bash")
    functions = (f"f{n}() {{\n{block.text}}}\n" for n, block in enumerate(shown))
    done = bash_n("".join(functions))
    assert not done, [f"{block.page}: {bash_n(block.text)}" for block in shown]


def test_every_command_line_is_accepted() -> None:
    found = pages.commands("collapipe")
    assert len(found) > 30
    for said, arguments in found:
        refusal = refused(arguments)
        assert not refusal, f"{said.page}: collapipe {' '.join(arguments)}: {refusal}"


def test_a_wrong_option_is_found() -> None:
    assert refused(["run", ".", "--colour", "red"])
    assert refused(["fly"])
    assert not refused(["run", ".", "-c", "seed=1"])


def test_inline_commands_name_commands_and_options_that_exist() -> None:
    tree = reference.command_tree()
    for said in pages.inline():
        if not said.text.startswith("collapipe "):
            continue
        words = [word for word in said.text.split() if word.strip(".")]
        named = [name for name in tree if " ".join(words).startswith(name)]
        group = [name for name in tree if name.startswith(" ".join(words[:2]) + " ")]
        meant = named[-1:] or group or (list(tree) if words[1].isupper() else [])
        assert meant, f"no such command: {said}"
        options = {option for name in meant for option in options_of(tree[name])}
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"no such option: {said}"


def test_every_run_config_key_exists() -> None:
    said = [
        (source.page.name, key)
        for source in (*pages.inline(), *pages.blocks("bash"), *pages.blocks("toml"))
        for key in KEY.findall(source.text)
        if not key.endswith(SUFFIXES)
    ]
    assert len(said) > 80
    assert not [(page, key) for page, key in said if key not in reference.defaults()]


def test_values_on_command_lines_are_accepted() -> None:
    for _, arguments in pages.commands("collapipe"):
        pairs = pairwise(arguments)
        given = [value for option, value in pairs if option in ("-c", "--run-config")]
        values = dict(map(assignment, (v for v in given if not v.endswith(".toml"))))
        files = [ROOT / v for v in given if v.startswith("examples/")]
        for file in files:
            values |= dict(reference.flattened(tomllib.loads(file.read_text())))
        reference.parse(values)


def test_run_config_files_are_accepted() -> None:
    shown = [
        block for block in pages.blocks("toml") if re.match(r"# \S*(run|boards)\.toml", block.text)
    ]
    assert shown
    for block in shown:
        reference.parse(dict(reference.flattened(tomllib.loads(block.text))))


def test_cluster_files_are_accepted(tmp_path: Path) -> None:
    shown = [
        block
        for block in pages.blocks("toml")
        if re.search(r"^\[\[device\]\]", block.text, re.M)
        and not re.search("^host = ", block.text, re.M)  # an inventory
    ]
    assert shown
    for block in shown:
        file = tmp_path / "cluster.toml"
        file.write_text(block.text)
        read_cluster(file)


def test_every_key_has_a_meaning_and_no_other() -> None:
    assert set(reference.meanings()) == set(reference.defaults())
    assert {reference.section_of(key) for key in reference.defaults()} == set(reference.TITLES)


def test_the_reference_shows_every_key_and_option() -> None:
    table = reference.run_config()
    assert all(f"* `{key}` (" in table for key in reference.defaults())
    assert "one of gpipe, 1f1b" in table and "0 or >= 1" in table
    commands = reference.commands()
    for name, command in reference.command_tree().items():
        if reference.BENCH in name:
            continue
        shown = commands.partition(f"## {name}\n")[2].partition("\n## ")[0]
        options = [o for p in command.params if isinstance(p, click.Option) for o in p.opts]
        assert command.params or name == "collapipe supernode", name  # whose options are Flower's
        assert shown and all(f"`{option}`" in shown for option in options)


def test_a_profile_plans_with_the_settings_of_a_run() -> None:
    options = {p.name: p.default for p in reference.command_tree()["collapipe profile"].params}
    run = reference.defaults()
    assert options["max_model_share"] == run["scheduler.max-model-share"]
    assert options["schedule"] == run["scheduler.schedule"]


def test_the_pages_of_the_reference_are_what_the_code_says() -> None:
    for path in reference.FOLDER.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert text == reference.page(text), f"{path.name} is outdated: run `make reference`"
    shown = (reference.FOLDER / "api.md").read_text(encoding="utf-8")
    assert f"* `{collapipe_flwr.__all__[0]}(" in shown


def test_every_imported_or_documented_name_exists() -> None:
    for block in pages.blocks("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "collapipe_flwr"
            ):
                for alias in node.names:
                    assert defines(f"{node.module}.{alias.name}"), f"{block.page}: {alias.name}"
    dotted = re.compile(rf"^::: ({NAME.pattern})$", re.MULTILINE)
    names = {(page, n) for page in PAGES for n in dotted.findall(page.read_text(encoding="utf-8"))}
    names |= {(said.page, said.text) for said in pages.inline() if NAME.fullmatch(said.text)}
    assert not [(page.name, name) for page, name in names if not defines(name)]


def test_the_api_page_shows_every_public_name() -> None:
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: collapipe_flwr\.(\w+)$", page, re.MULTILINE))
    assert shown == {name for name in collapipe_flwr.__all__ if not name.startswith("_")}


def test_links_lead_to_files_and_headings() -> None:
    for said in pages.links():
        path, _, anchor = said.text.partition("#")
        target = (said.page.parent / path).resolve() if path else said.page
        assert target.exists(), f"dead link: {said}"
        if anchor and target.suffix == ".md" and "reference" not in target.parts:
            assert anchor in pages.anchors(target), f"no such heading: {said}"


def test_files_that_documents_name_exist() -> None:
    for said in pages.inline():
        for name in FILES.findall(said.text):
            found = any((ROOT / folder / name).exists() for folder in CODE_FOLDERS)
            assert found or "RUN" in name, f"no such file: {said}"


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f": {name}\n" in listed


def refused(arguments: list[str]) -> str:
    """Why the command line is not accepted; files need not exist."""
    tree = reference.command_tree()
    for length in (2, 1):
        name = " ".join(["collapipe", *arguments[:length]])
        if name in tree:
            break
    else:
        return "" if arguments[1:] == ["--help"] else "no such command"
    try:
        tree[name].make_context(name, list(arguments[length:]))
    except click.BadParameter as error:
        return "" if "does not exist" in error.message else error.message
    except click.UsageError as error:
        return error.message
    return ""


def bash_n(text: str) -> str:
    """What bash says against the text without running it."""
    command = ["bash", "-n"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60).stderr


def assignment(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` with a TOML value, or a string."""
    key, _, value = text.partition("=")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def options_of(command: click.Command) -> set[str]:
    """Every option of a command."""
    return {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}


def defines(name: str) -> bool:
    """Whether a dotted name is a module, or a module's source defines or exports it."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module, _, attribute = name.rpartition(".")
    base = ROOT.joinpath(*module.split("."))
    source = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    defined = rf"^(?:class|def) {attribute}\b|^{attribute}\b.*="
    exported = rf"^\s+\"?{attribute}\"?,?$|import .*\b{attribute}\b"
    pattern = f"{defined}|{exported}"
    return source.is_file() and bool(re.search(pattern, source.read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "name", ["collapipe_flwr.federation.strategy.Nothing", "collapipe_flwr.no"]
)
def test_a_name_that_is_not_there_is_found_missing(name: str) -> None:
    assert not defines(name)
    assert isinstance(pages.inline()[0], Said)


def test_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    sources = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for folder in ("collapipe_flwr", "server_app", "client_app")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    before_runs, _, _ = page.partition("## While it trains")
    quoted = [line.split("`")[1] for line in before_runs.splitlines() if line.startswith("| `")]
    assert len(quoted) > 8
    for sentence in quoted:
        for piece in filter(None, map(str.strip, sentence.split("..."))):
            assert piece in sources, piece
