"""A run on real clusters from one machine: server and control units in one process, without Flower.

    python -m collapipe_flwr.federation.local_run RUN_CONFIG CLUSTER_FILE ...

in the folder of the app. Devices and edge are daemons, so neither SuperLink nor Ray is needed:
messages between the ServerApp and the ClientApps of the clusters stay in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from collapipe_flwr.config.overrides import declared_config, overridden, read_toml
from collapipe_flwr.core.errors import CollaPipeError, ConfigError
from collapipe_flwr.federation.app_code import load_app
from collapipe_flwr.federation.local_grid import SERVER_NODE, LocalGrid
from collapipe_flwr.federation.node_keys import CLUSTER_KEY, CONTROL_UNIT_KEY

_FIRST_NODE = SERVER_NODE + 1


def run_locally(project: Path, run_config: dict[str, Any], clusters: Sequence[Path]) -> None:
    """Run the app in ``project`` to its end; raises what its ServerApp raises."""
    sys.path.insert(0, str(project))
    server, client = (load_app(_component(project, name)) for name in ("serverapp", "clientapp"))
    configs: dict[int, dict[str, str | int | float | bool]] = {
        _FIRST_NODE + index: {
            "partition-id": index,
            "num-partitions": len(clusters),
            CLUSTER_KEY: str(file),
            CONTROL_UNIT_KEY: "",
        }
        for index, file in enumerate(clusters)
    }
    grid = LocalGrid(
        dict.fromkeys(configs, client), node_configs=configs, run_config=run_config, at_once=True
    )
    server(grid, Context(1, SERVER_NODE, {}, RecordDict(), run_config))


def _component(project: Path, name: str) -> str:
    tables = read_toml(project / "pyproject.toml", "pyproject.toml")
    found = tables.get("tool", {}).get("flwr", {}).get("app", {}).get("components", {}).get(name)
    if not isinstance(found, str):
        raise ConfigError(f"{project}/pyproject.toml names no {name} in tool.flwr.app.components")
    return found


def main() -> None:
    """Run the command line's app; an error is the last line on stderr."""
    config, *clusters = sys.argv[1:]
    project = Path.cwd()
    values = overridden(declared_config(project), _written(Path(config)))
    try:
        run_locally(project, values, [Path(file) for file in clusters])
    except CollaPipeError as error:  # the ServerApp has logged it
        raise SystemExit(1) from error


def _written(path: Path) -> dict[str, Any]:
    """What `write_overrides` wrote; its keys are those of the launcher, too."""
    return read_toml(path, str(path))


if __name__ == "__main__":
    main()
