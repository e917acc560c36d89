"""The options that ``collapipe edge`` and ``collapipe device`` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collapipe_flwr.config.cluster_file import ClusterConfig
    from collapipe_flwr.core.tls_files import TlsFiles
    from collapipe_flwr.host.daemon import HostSettings

Listen = Annotated[
    str, typer.Option(help="HOST:PORT; port 0 takes a free one. Default: that of --cluster.")
]
Cluster = Annotated[
    list[Path] | None,
    typer.Option(help="Cluster files (TOML), or a folder of them: address, TLS, who may call."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Common names of certificates that may call, besides the clusters'."),
]
Ca = Annotated[Path | None, typer.Option("--tls-ca", help="PEM: who signs the peers.")]
Certificate = Annotated[Path | None, typer.Option("--tls-cert", help="PEM: our certificate.")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="PEM: its private key.")]
StateDir = Annotated[
    Path | None, typer.Option(help="Keep sessions here, so that a restart goes on with them.")
]
MemoryMb = Annotated[
    float,
    typer.Option(
        help="For models in all, without activations; 0: as much as is free at the start.", min=0
    ),
]
Threads = Annotated[int, typer.Option(help="To compute on; 0: one per core.", min=0)]
Insecure = Annotated[bool, typer.Option(help="Plain text beyond loopback, knowing what it means.")]
Grace = Annotated[float, typer.Option(help="Seconds that open sessions get on a stop.", min=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """What the user typed; the files of `--tls-*` win over those of `--cluster`."""

    name: str
    listen: str
    fallback: str
    clusters: list[Path] | None
    allow: list[str] | None
    ca: Path | None
    certificate: Path | None
    key: Path | None
    insecure: bool
    grace_s: float
    memory_mb: float
    state_dir: Path | None = None
    cache_dir: Path | None = None
    cache_mb: float = 0.0
    radio_interface: str = ""
    threads: int = 0

    def settings(self) -> HostSettings:
        """The daemon that was asked for; raises ConfigError."""
        from collapipe_flwr.config.access_control import roster_of
        from collapipe_flwr.host.daemon import HostSettings
        from collapipe_flwr.pipeline.benchmark import available_memory_bytes

        clusters = self._clusters()
        files = tls_files(self.ca, self.certificate, self.key)
        tls = files or next((c.tls_files(self.name) for c in clusters), None)
        roster = roster_of(clusters, self.allow or ())
        return HostSettings(
            listen=self.listen or self._address(clusters) or self.fallback,
            name=self.name,
            tls=tls,
            insecure=self.insecure,
            roster=roster if tls and roster.callers else None,
            grace_s=self.grace_s,
            state_dir=self.state_dir,
            cache_dir=self.cache_dir,
            cache_bytes=int(self.cache_mb * 1e6),
            memory_bytes=int(self.memory_mb * 1e6) or available_memory_bytes(),
            radio_interface=self.radio_interface,
            threads=self.threads,
        )

    def _clusters(self) -> list[ClusterConfig]:
        """The files named, and of folders those that list this member."""
        from collapipe_flwr.config.cluster_file import clusters_in, read_cluster

        paths = self.clusters or []
        files = [read_cluster(path) for path in paths if not path.is_dir()]
        return files + [c for p in paths if p.is_dir() for c in clusters_in(p, self.name)]

    def _address(self, clusters: list[ClusterConfig]) -> str:
        return next((a for c in clusters if (a := c.member(self.name).address)), "")


def tls_files(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """All three files or none; raises ConfigError for less, so that TLS is always mutual."""
    from collapipe_flwr.core.errors import ConfigError
    from collapipe_flwr.core.tls_files import TlsFiles

    given = {"--tls-ca": ca, "--tls-cert": certificate, "--tls-key": key}
    missing = [name for name, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(f"{missing[0]} is missing: both sides show a certificate, or none does")
    return TlsFiles(ca=ca, certificate=certificate, key=key)
