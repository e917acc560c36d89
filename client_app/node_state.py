"""What a cluster carries from one round to the next: in files of its own, or in Flower's state.

What a round leaves is pending until a later order names that round as the last accepted one; the
cluster continues from exactly that round, whatever it has trained since.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from client_app.data import Place
from collapipe_flwr.cluster.round_files import RoundFiles
from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.rounds import Progress

STATE_KEY = "state-dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of one cluster in one round of a run.

    ``state_dir`` is that of the node-config, else the run's `train.state-dir`: files there survive
    a restart of the SuperNode and are used by a resumed run. Flower's ``records`` are for a cluster
    without one, and end with the SuperNode and with the run.
    """

    records: RecordDict
    server_round: int
    progress: Progress
    run_id: str
    place: Place
    state_dir: Path | None

    @staticmethod
    def of(
        config: AppConfig,
        place: Place,
        context: Context,
        server_round: int,
        progress: Progress,
        run_id: str,
    ) -> NodeState:
        """As run-config and node-config ask; raises ConfigError."""
        folder = context.node_config.get(STATE_KEY, config.train.state_dir)
        if not isinstance(folder, str):
            raise ConfigError(f"node-config {STATE_KEY} must be the path of a folder: {folder!r}")
        return NodeState(
            records=context.state,
            server_round=server_round,
            progress=progress,
            run_id=run_id,
            place=place,
            state_dir=Path(folder).expanduser() if folder and run_id else None,
        )

    def files(self, suffix: str) -> RoundFiles | None:
        """The files with that suffix, where there is a state directory."""
        if self.state_dir is None:
            return None
        return RoundFiles.of(self.state_dir, self.run_id, self.place.index, suffix)

    def recall(self, name: str) -> ArrayRecord | ConfigRecord | None:
        """The record of the last accepted round in Flower's state; all others are dropped."""
        accepted = _key(name, self.progress.last_round)
        for key in [key for key in self.records if key.startswith(name) and key != accepted]:
            del self.records[key]
        found = self.records.get(accepted)
        return found if isinstance(found, ArrayRecord | ConfigRecord) else None

    def remember(self, name: str, record: ArrayRecord | ConfigRecord) -> None:
        """Keep the record of this round in Flower's state, beside that of the accepted one."""
        self.records[_key(name, self.server_round)] = record


def _key(name: str, server_round: int) -> str:
    return f"{name}.round-{server_round}"
