"""Run an app through ``flwr run . --stream`` on a SuperLink of its own.

``flwr run`` keeps one detached local SuperLink per port and reuses whichever answers there, with
the environment and working directory of its first launcher; and with ``--stream`` it exits with 0
even when the run failed. So :func:`run_app` starts a private SuperLink (own ports, own Flower
home, this very Python environment), lets ``flwr run`` find that one, reads the outcome from the
run directory, and stops what it started. What it started also ends when this process is killed.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.extras import require
from collapipe_flwr.core.keeper import keeping
from collapipe_flwr.core.parsing import Value
from collapipe_flwr.core.signals import terminable
from collapipe_flwr.federation.overrides import write_overrides

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
