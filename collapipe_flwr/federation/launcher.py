"""Run an app through ``flwr run . --stream`` on a SuperLink of its own.

``flwr run`` keeps one detached local SuperLink per port and reuses whichever answers there, with
the environment and working directory of its first launcher; and with ``--stream`` it exits with 0
even when the run failed. So :func:`run_app` starts a private SuperLink (own ports, own Flower
home, this very Python environment), lets ``flwr run`` find that one, reads the outcome from the
run directory, and stops what it started. What it started also ends when this process is killed.

Overrides of the run-config, from files and the command line, are merged into one flat file for
Flower: ``flwr run --run-config a.b=1 --run-config a.c=2`` keeps only ``a.c``, because each flag
replaces the whole table ``a``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collapipe_flwr.config.parsing import refuse_unknown
from collapipe_flwr.config.schema import known_keys, parse
from collapipe_flwr.core.errors import ConfigError, RunError, require
from collapipe_flwr.core.keys import Value
from collapipe_flwr.core.processes import keeping, terminable


def read_overrides(sources: Sequence[str]) -> dict[str, Value]:
    """Merge ``KEY=VALUE`` pairs and ``.toml`` files, later ones first in rank.

    A value is TOML; what is none is taken as a string, so quotes are optional. Raises ConfigError.
    """
    merged: dict[str, Value] = {}
    for source in sources:
        merged |= _read_file(Path(source)) if source.endswith(".toml") else _read_pair(source)
    return merged


def check_overrides(project: Path, overrides: Mapping[str, Value]) -> None:
    """Raise ConfigError for keys that the app does not declare; Flower would not say which.

    For an app with exactly our keys, its values are checked as well, and that the extra ``data``
    is installed, before anything starts.
    """
    # The launcher sets these itself, to find the run again.
    for key, option in (("output-dir", "output-dir"), ("run-name", "output-dir"), ("resume",) * 2):
        if key in overrides:
            raise ConfigError(f"--run-config {key} cannot be set here: use --{option}")
    path = project / "pyproject.toml"
    if not path.exists():
        raise ConfigError(f"{project} is no Flower app: it has no pyproject.toml")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    declared = _flat(table.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}))
    refuse_unknown(overrides, set(declared))
    if set(declared) == known_keys():
        require("datasets", "data")
        parse({**declared, **overrides})


def write_overrides(overrides: Mapping[str, Value], path: Path) -> None:
    """A flat TOML file; JSON's strings, numbers and truth values are TOML's as well."""
    lines = [f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in overrides.items()]
    path.write_text("".join(lines), encoding="utf-8")


def _read_file(path: Path) -> dict[str, Value]:
    try:
        return _flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--run-config {path} cannot be read ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--run-config {path} is not TOML: {error}") from error


def _read_pair(source: str) -> dict[str, Value]:
    key, equals, text = source.partition("=")
    if not key.strip() or not equals:
        raise ConfigError(f"--run-config {source!r} is neither KEY=VALUE nor a .toml file")
    try:
        value: Value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return {key.strip(): value}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for key, value in table.items():
        name = prefix + key
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


_START_S = 60.0
_PROBE_S = 0.25
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run: an app folder, overrides of its run-config, where results go."""

    app: Path
    output_dir: Path
    run_name: str
    run_config: Mapping[str, Value] = field(default_factory=dict)
    federation_config: Path | None = None

    @property
    def run_dir(self) -> Path:
        """Where the ServerApp leaves its results."""
        return self.output_dir / self.run_name


def run_app(launch: Launch) -> str | None:
    """Run to the end, showing Flower's log; the first error in it, or None.

    Raises RunError when the SuperLink does not start, ConfigError when Ray is not installed, and
    SystemExit on SIGTERM or SIGINT.
    """
    require("ray", "simulation")
    with terminable(), tempfile.TemporaryDirectory(prefix="collapipe-flwr-home-") as home:
        env = private_environment(Path(home))
        config = Path(home) / "run-config.toml"
        where = {"output-dir": str(launch.output_dir), "run-name": launch.run_name}
        write_overrides({**launch.run_config, **where}, config)
        with private_superlink(launch.app, env):
            return _show(_flwr_run(launch, config), launch.app, env)


def _flwr_run(launch: Launch, config: Path) -> list[str]:
    command = [_script("flwr"), "run", ".", "--stream", "--run-config", str(config)]
    if launch.federation_config is not None:
        command += ["--federation-config", str(launch.federation_config.resolve())]
    return command


def _show(command: list[str], app: Path, env: dict[str, str]) -> str | None:
    """Pass the command's output on line by line; the first line that Flower logged as error."""
    first_error = None
    with subprocess.Popen(
        keeping(command),
        cwd=app,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            plain = _COLOUR.sub("", line)
            if first_error is None and plain.startswith("ERROR"):
                first_error = plain.partition(":")[2].strip()
    return first_error


def private_environment(home: Path) -> dict[str, str]:
    """The caller's environment, with a Flower home and ports that nobody else uses."""
    http_port, control_port = _free_ports(2)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {
        **quiet,
        **os.environ,
        "PATH": path,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http_port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


@contextmanager
def private_superlink(app: Path, env: dict[str, str]) -> Iterator[None]:
    """A local SuperLink in simulation mode, stopped on the way out with all its children."""
    log_path = Path(env["FLWR_HOME"]) / "superlink.log"
    http_port = env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
    control = f"127.0.0.1:{env['FLWR_LOCAL_CONTROL_API_PORT']}"
    command = [_script("flower-superlink"), "--insecure", "--simulation"]
    command += ["--isolation", "subprocess", "--control-api-address", control]
    command += ["--host", "127.0.0.1", "--port", http_port]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            keeping(command), cwd=app, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log
        ) as process,
    ):
        _wait_until_healthy(process, f"http://127.0.0.1:{http_port}/health", log_path)
        yield


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=_PROBE_S):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_PROBE_S)
    tail = log_path.read_text(errors="replace").strip().splitlines()[-1:]
    raise RunError(
        f"the local Flower SuperLink did not start within {_START_S:.0f} s "
        f"({tail[0] if tail else 'no output'}); try `flower-superlink --insecure --simulation`"
    )


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _script(name: str) -> str:
    """A command of this Python environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise RunError(f"{name} is not installed beside {sys.executable}; run `pip install -e .`")
    return str(path)
