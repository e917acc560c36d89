"""One `collapipe run`, from its start to a correct final summary.

The result of a run is what its directory says, as far as this attempt wrote it: a ServerApp that
fails before it writes anything leaves the summary of an earlier attempt, which is not a result.
However the attempt ends, the summary is corrected afterwards, when no other process can write it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from collapipe_flwr.config.cluster_file import ClusterConfig, read_cluster
from collapipe_flwr.config.parsing import declared_config, override, read_overrides
from collapipe_flwr.core.durable import make_numbered_folder, write_file
from collapipe_flwr.core.errors import ConfigError, RunError, mark_wrong_input, require
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.federation.run.launcher import CLUSTERS, Launch, first_error, run_app
from collapipe_flwr.reporting.report.page import has_report, write_closing_report
from collapipe_flwr.reporting.run_directory import (
    RunDirectory,
    newest_checkpoint,
    read_summary,
    resume_config,
    rounds_done,
    summary_stamp,
)
from collapipe_flwr.reporting.run_lock import (
    INTERRUPTED,
    LAUNCHER,
    RUNNING,
    lock_file,
    note_process,
)
from collapipe_flwr.reporting.screen import Follower, Screen

_OURS = ("output-dir", "run-name", "train.state-dir")  # run-config of the launcher's own


def launch_of(
    project: Path,
    run_config: Sequence[str] | None = None,
    federation_config: Path | None = None,
    output_dir: Path = Path("runs"),
    resume: Path | None = None,
    clusters: Sequence[Path] | None = None,
) -> Launch:
    """Prepare the run to start, from the arguments of `collapipe run`.

    ``clusters`` are files of those that train, instead of simulated ones. Raises ConfigError for
    keys that the app does not declare, and for an app without those that are set here.
    """
    declared = declared_config(project)
    ours = [*_OURS, *(("clusters", "edge.address") if clusters else ())]
    if missing := [key for key in ours if key not in declared]:
        raise ConfigError(
            f"{project} does not declare {', '.join(missing)} in [tool.flwr.app.config], which "
            "`collapipe run` sets: start this app with `flwr run`"
        )
    overrides: Mapping[str, Any] = read_overrides(run_config or (), declared)
    if clusters and "edge.address" not in overrides:
        overrides = {**edge_of(clusters), **overrides}
    override(declared, overrides)
    run_dir = output_dir.resolve() / time.strftime("%Y%m%d-%H%M%S")
    if resume is not None:
        run_dir = resume.resolve()
        overrides = _where_it_is(resume_config(run_dir, overrides))
    return Launch(
        app=project.resolve(),
        output_dir=run_dir.parent,
        run_name=run_dir.name,
        run_config=overrides,
        federation_config=federation_config and federation_config.resolve(),
        clusters=tuple(path.resolve() for path in clusters or ()),
    )


def _where_it_is(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Drop ``train.state-dir`` if it is in the run's own folder, which may have been moved."""
    began = Path(saved.get("output-dir", ""), saved.get("run-name", ""), CLUSTERS)
    state = saved.get("train.state-dir")
    return {k: v for k, v in saved.items() if k != "train.state-dir" or state != str(began)}


def edge_of(files: Sequence[Path]) -> dict[str, Any]:
    """Build the run-config by which a server here reaches the common edge of these cluster files.

    The server only asks it how far rounds are. Clusters with different edges have none in common.
    """
    clusters = [read_cluster(file) for file in files]
    found: dict[str, Any] = {"clusters": len(files), "edge.address": ""}
    named = [cluster for cluster in clusters if _serves_edge(cluster)]
    if not named or len({cluster.edge.address for cluster in named}) > 1:
        return found
    found["edge.address"] = named[0].edge.address
    if (tls := _server_files(named[0], alone=len(files) == 1)) is not None:
        pem = {"edge.tls-ca": tls.ca, "edge.tls-cert": tls.certificate, "edge.tls-key": tls.key}
        found |= {"edge.certificate-name": named[0].edge.name}
        found |= {key: str(path and path.resolve()) for key, path in pem.items()}
    return found


def _serves_edge(cluster: ClusterConfig) -> bool:
    """Whether a daemon serves the cluster's edge; a control unit does only while it trains."""
    return bool(cluster.edge.address) and not cluster.edge_is_control_unit


def _server_files(cluster: ClusterConfig, *, alone: bool) -> TlsFiles | None:
    """Find the server's TLS files; for a single cluster, its control unit's will do."""
    own, unit = (cluster.tls_files(m.name) for m in (cluster.server, cluster.control_unit))
    if own is None or own.key is None or unit is None or unit.key is None:
        return own
    return unit if alone and unit.key.exists() and not own.key.exists() else own


class Attempt:
    """A run that is started or resumed, shown on ``screen``."""

    def __init__(self, launch: Launch, screen: Screen) -> None:
        self._launch, self._screen = launch, screen
        self._began = False
        self._before: tuple[int, int] | None = None  # the summary of an earlier attempt

    @property
    def run_dir(self) -> Path:
        """The directory of the run; a new one may get another name when it is made."""
        return self._launch.run_dir

    def check(self) -> None:
        """Check the run in a child process before anything is started.

        This process thus loads no heavy libraries, and answers signals at once. Raises ConfigError
        for a missing extra, and SystemExit if the child refused the run and printed why.
        """
        with mark_wrong_input():
            if not self._launch.clusters:
                require("ray", "simulation")
        command = [sys.executable, "-m", "collapipe_flwr.cli.child", "check-config", "--launch"]
        with (
            self._screen.phase("checking run-config, data, model and plan"),
            subprocess.Popen(
                [*command, self._launch.to_json()],
                cwd=self._launch.app,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            found = process.stdout.read()
        if process.returncode:
            raise SystemExit(process.returncode)
        for line in found.splitlines():
            self._screen.say(line)
        if "resume" in self._launch.run_config:
            self._screen.say(self._resumed())

    def _resumed(self) -> str:
        """How the earlier attempt ended, and where this one continues."""
        summary, newest = self._summary, newest_checkpoint(self.run_dir)
        asked, status = summary.get("rounds_asked"), summary.get("status", "interrupted")
        place = f"round {rounds_done(self.run_dir)}" + (f" of {asked}" if asked else "")
        where = f"goes on after round {newest}" if newest else "begins again"
        return f"the run was {status} after {place}; it {where}"

    def stopping(self) -> str:
        """Format the message after a signal: where the run stops and how to resume it."""
        if not self._began:
            return "stopping; nothing was started yet"
        done = rounds_done(self.run_dir) if self._wrote else 0
        asked = self._summary.get("rounds_asked")
        place = f"round {done}" + (f" of {asked}" if asked else "")
        where = f"stopping after {place}" if done else "stopping before the end of the first round"
        return f"{where}; {self._way_on()}"

    def carry_out(self) -> Mapping[str, Any]:
        """Run to the end; returns the summary of a completed run.

        Raises RunError for any other, SystemExit on a signal.
        """
        with ExitStack() as lock:
            begin = self._open_log(lock)
            lock.enter_context(note_process(self.run_dir, LAUNCHER))
            return self._carried_out(begin)

    def _carried_out(self, begin: int) -> Mapping[str, Any]:
        follower = Follower(self.run_dir, self._screen)
        reason: str | None = None
        self._before = summary_stamp(self.run_dir)
        self._began = True
        try:
            engine = "starting Flower: SuperLink, Ray and the apps"
            with self._screen.phase("starting the apps" if self._launch.clusters else engine):
                run_app(self._launch, follower.look)
        except SystemExit:
            self._close("stopped", "stopped by a signal")
            self._report(hasty=True)
            raise
        except RunError as error:
            reason = str(error)
        reason = reason or first_error(self._launch.log, begin)
        self._close("failed", reason or "it ended without a word")
        self._report()
        summary = self._summary if self._wrote else {}
        if summary.get("status") != "completed":
            why = summary.get("reason") or reason or "it ended before its first round"
            raise RunError(self._failure(why))
        return summary

    @property
    def _wrote(self) -> bool:
        """Whether this attempt has written the summary."""
        return summary_stamp(self.run_dir) != self._before

    @property
    def _summary(self) -> Mapping[str, Any]:
        return read_summary(self.run_dir) or {}

    def _open_log(self, lock: ExitStack) -> int:
        """Create folder and log of a new run; returns the size that the log has already.

        ``lock`` holds the lock of a new log: its run has no run-config to lock yet.
        """

        def begin(log: Path) -> None:
            log.touch()
            lock.enter_context(lock_file(log))

        try:
            if not self._launch.resumes:
                name = make_numbered_folder(self.run_dir).name
                self._launch = replace(self._launch, run_name=name)
                write_file(self._launch.log, begin)
            with self._launch.log.open("ab") as file:
                return file.tell()
        except OSError as error:
            raise ConfigError(
                f"--output-dir: {self._launch.log} cannot be written ({error.strerror}); choose "
                "another folder"
            ) from error

    def _close(self, status: str, reason: str) -> None:
        """Replace the status of an attempt whose processes ended while it was running."""
        summary = self._summary
        if self._wrote and summary.get("status") in (RUNNING, INTERRUPTED):
            directory = RunDirectory.reopen(self.run_dir)
            directory.write_summary({**summary, "status": status, "reason": reason})

    def _report(self, *, hasty: bool = False) -> None:
        """Write the report if it is missing, and print its path."""
        logged = self._screen.verbose and has_report(self.run_dir)
        if self._wrote and not logged:
            name = shown(self.run_dir)
            self._screen.say(write_closing_report(self.run_dir, name, hasty=hasty))

    def _failure(self, why: str) -> str:
        why = why.rstrip(".")
        return f"the run failed: {why} ({self._way_on()}; the whole log is {self._launch.log})"

    def _way_on(self) -> str:
        newest = newest_checkpoint(self.run_dir)
        if not newest:
            return "no round has a checkpoint yet, so start it again"
        behind = newest < rounds_done(self.run_dir)
        where = f" (it goes on after round {newest})" if behind else ""
        options = [("--cluster", path) for path in self._launch.clusters]
        if self._launch.federation_config is not None:
            options.append(("--federation-config", self._launch.federation_config))
        options.append(("--resume", self.run_dir))
        said = " ".join(f"{option} {shown(path)}" for option, path in options)
        return f"resume with `collapipe run {shown(self._launch.app)} {said}`{where}"


def shown(path: Path) -> str:
    """Return a path relative to the current folder, or as given if that is not longer."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
