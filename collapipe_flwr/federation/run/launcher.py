"""Run an app with ``flwr run . --stream`` on a private SuperLink, or on real clusters.

``flwr run`` reuses whichever local SuperLink answers at its port, with the environment and working
directory of that one's launcher; with ``--stream`` it exits with 0 even when the run failed. So
:func:`run_app` starts a SuperLink of its own (own ports, own Flower home, this Python environment),
and stops it afterwards; all its processes also end if this one is killed. Output goes to the log in
the run directory, which also holds the result of the run (`federation.running`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from collapipe_flwr.config.parsing import write_overrides
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.core.links import find_free_ports
from collapipe_flwr.core.processes import guard_command
from collapipe_flwr.reporting.run_lock import LOG

CLUSTERS = "clusters"  # in the run directory: their state, unless the run-config names a folder
_START_S = 60.0
_PROBE_S = 0.25
_LOOK_S = 0.2
_PATIENCE_S = 5.0  # that Flower and Ray get to end; `collapipe run` is to end within 10 s
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An app folder, overrides of its run-config, and the output directory.

    ``clusters`` are files of real clusters, on which it runs without Flower's simulation.
    """

    app: Path
    output_dir: Path
    run_name: str
    run_config: Mapping[str, Value] = field(default_factory=dict)
    federation_config: Path | None = None
    clusters: tuple[Path, ...] = ()

    @property
    def run_dir(self) -> Path:
        """The directory of the run's results."""
        return self.output_dir / self.run_name

    @property
    def log(self) -> Path:
        """The file with all output of Flower, Ray and the apps."""
        return self.run_dir / LOG

    @property
    def resumes(self) -> bool:
        """Whether the directory is that of an earlier run."""
        return self.run_config.get("resume") == str(self.run_dir)

    @property
    def settings(self) -> Mapping[str, Value]:
        """The run-config, with where the run is."""
        state = {"train.state-dir": str(self.run_dir / CLUSTERS)}
        where = {"output-dir": str(self.output_dir), "run-name": self.run_name}
        return {**state, **self.run_config, **where}

    def to_json(self) -> str:
        """Encode the fields for another process."""
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def of_json(text: str) -> Launch:
        found = json.loads(text)
        for name in ("app", "output_dir", "federation_config"):
            found[name] = found[name] and Path(found[name])
        return Launch(**{**found, "clusters": tuple(map(Path, found["clusters"]))})


def run_app(launch: Launch, look: Callable[[], None]) -> None:
    """Run to the end, with Flower's log in the run directory; ``look`` is called repeatedly.

    Raises RunError when the SuperLink does not start.
    """
    with tempfile.TemporaryDirectory(prefix="collapipe-flwr-home-") as home:
        env = build_environment(Path(home))
        config = Path(home) / "run-config.toml"
        write_overrides(launch.settings, config)
        with (
            launch.log.open("ab") as log,
            nullcontext() if launch.clusters else start_superlink(launch.app, env),
            _start(_build_command(launch, config), launch.app, env, log) as process,
        ):
            while process.poll() is None:
                look()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
    look()


def first_error(log: Path, start: int = 0) -> str | None:
    """Find the first error in Flower's log after byte ``start``, on one line."""
    with log.open("rb") as file:
        file.seek(start)
        for line in file.read().decode(errors="replace").splitlines():
            plain = _COLOUR.sub("", line)
            if plain.startswith("ERROR"):
                return plain.partition(":")[2].strip()
    return None


def _build_command(launch: Launch, config: Path) -> list[str]:
    """Build the command that runs the app: `flwr run`, or this package on real clusters."""
    if launch.clusters:
        here = [sys.executable, "-m", "collapipe_flwr.federation.local_grid", str(config)]
        return [*here, *map(str, launch.clusters)]
    command = [_find_script("flwr"), "run", ".", "--stream", "--run-config", str(config)]
    if launch.federation_config is not None:
        command += ["--federation-config", str(launch.federation_config)]
    return command


def _start(
    command: list[str], app: Path, env: dict[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process that ends, with its children, when the context is left."""
    return subprocess.Popen(
        guard_command(command, _PATIENCE_S),
        cwd=app,
        env=env,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
    )


def build_environment(home: Path) -> dict[str, str]:
    """Build the caller's environment with a Flower home and ports of its own."""
    http_port, control_port = find_free_ports(2)
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
def start_superlink(app: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a local SuperLink in simulation mode, stopped with all its children on exit."""
    log_path = Path(env["FLWR_HOME"]) / "superlink.log"
    http_port = env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
    control = f"127.0.0.1:{env['FLWR_LOCAL_CONTROL_API_PORT']}"
    command = [_find_script("flower-superlink"), "--insecure", "--simulation"]
    command += ["--isolation", "subprocess", "--control-api-address", control]
    command += ["--host", "127.0.0.1", "--port", http_port]
    with log_path.open("wb") as log, _start(command, app, env, log) as process:
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


def _find_script(name: str) -> str:
    """Find the path of a command in this Python environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise RunError(f"{name} is not installed beside {sys.executable}; run `pip install -e .`")
    return str(path)
