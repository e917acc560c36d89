"""What a cluster carries from one round to the next: in files of its own, or in Flower's state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, RecordDict

from client_app.data import Place
from collapipe_flwr.cluster.round_files import RoundFiles
from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.core.errors import ConfigError

STATE_KEY = "state-dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of one cluster in one round of a run.

    ``state_dir`` is that of the node-config, else the run's `train.state-dir`: what lies there a
    SuperNode that is started again finds, and a run that is resumed. Flower's ``records`` are for a
    cluster without one, and end with the SuperNode and with the run.
    """

    records: RecordDict
    server_round: int
    run_id: str
    place: Place
    state_dir: Path | None
    checkpoint_every: int

    @staticmethod
    def of(
        config: AppConfig, place: Place, context: Context, server_round: int, run_id: str
    ) -> NodeState:
        """As run-config and node-config ask; raises ConfigError."""
        folder = context.node_config.get(STATE_KEY, config.train.state_dir)
        if not isinstance(folder, str):
            raise ConfigError(f"node-config {STATE_KEY} must be the path of a folder: {folder!r}")
        return NodeState(
            records=context.state,
            server_round=server_round,
            run_id=run_id,
            place=place,
            state_dir=Path(folder).expanduser() if folder and run_id else None,
            checkpoint_every=config.run.checkpoint_every,
        )

    def files(self, suffix: str) -> RoundFiles | None:
        """The files with that suffix, where there is a state directory."""
        if self.state_dir is None:
            return None
        return RoundFiles.of(
            self.state_dir, self.run_id, self.place.index, suffix, self.checkpoint_every
        )
