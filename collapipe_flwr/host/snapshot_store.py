"""Sessions on disk, so that a host that restarts goes on where its clusters can follow.

One safetensors file per session holds weights and optimiser slots, and as metadata in JSON the
request, the number of steps done and what they measured; no pickle. A file is replaced as a whole
once the new one is on disk. It also holds the session's token: the folder is made for its owner
only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from collapipe_flwr.core.durable import own_folder, remove, write_file
from collapipe_flwr.core.errors import CollaPipeError, ConfigError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.host.session import Snapshot
from collapipe_flwr.pipeline.config import SessionRequest
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.state import PartState

_log = logging.getLogger(__name__)
_SUFFIX = ".safetensors"


class SnapshotStore:
    """A folder of sessions. Raises ConfigError when it cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._folder = own_folder(folder, "--state-dir")

    def write(self, snapshot: Snapshot) -> None:
        """Replace what is stored of this session; raises ConfigError when it cannot be written."""
        metadata = {"request": to_json(snapshot.request), "step": str(snapshot.step)}
        if snapshot.report is not None:
            metadata["report"] = to_json(snapshot.report)
        save = partial(save_file, dict(snapshot.state.tensors()), metadata=metadata)
        try:
            write_file(self._path(snapshot.request.key.session_id), save)
        except OSError as error:
            raise ConfigError(f'--state-dir "{self._folder}" cannot be written: {error}') from error

    def forget(self, session_id: str) -> None:
        """Drop what is kept of a session, if anything."""
        remove(self._path(session_id))

    def keep_only(self, session_ids: Iterable[str]) -> None:
        """Drop every other session: nobody asked for it in a long time."""
        wanted = {self._path(session_id) for session_id in session_ids}
        for path in set(self._folder.glob(f"*{_SUFFIX}")) - wanted:
            path.unlink(missing_ok=True)

    def read(self) -> Iterator[Snapshot]:
        """All sessions; a file that cannot be read is named in the log and left out."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                yield _read(path)
            except (OSError, ValueError, TypeError, SafetensorError, CollaPipeError) as error:
                _log.error("%s cannot be read, so its session is lost: %s", path, error)

    def _path(self, session_id: str) -> Path:
        """Ids may hold any printable character."""
        return self._folder / f"{sha256(session_id.encode()).hexdigest()[:32]}{_SUFFIX}"


def _read(path: Path) -> Snapshot:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 not a mapping
    report = metadata.get("report")
    return Snapshot(
        request=from_json(SessionRequest, metadata.get("request", ""), str(path)),
        step=int(metadata.get("step", "")),
        state=PartState.of_tensors(tensors),
        report=None if report is None else from_json(StageReport, report, str(path)),
    )
