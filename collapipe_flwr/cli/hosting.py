"""``collapipe edge``, ``device``, ``control-unit``, ``supernode``: daemons of edge and boards."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collapipe_flwr.config.cluster_file import ClusterConfig
    from collapipe_flwr.core.links import TlsFiles
    from collapipe_flwr.host.daemon import HostSettings
    from collapipe_flwr.host.rosters import Rosters


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
MemoryMb = Annotated[
    float,
    typer.Option(
        help="For models in all, without activations; 0: as much as is free where it computes.",
        min=0,
    ),
]
Threads = Annotated[int, typer.Option(help="To compute on; 0: one per core.", min=0)]
Compute = Annotated[
    str,
    typer.Option(help="Where: cpu, cuda, cuda:N, mps, xpu; auto: cuda or xpu if there, else cpu."),
]
Insecure = Annotated[bool, typer.Option(help="Plain text beyond loopback, knowing what it means.")]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Own models and losses may come from this module or package; may be repeated.",
    ),
]
Grace = Annotated[float, typer.Option(help="Seconds that open sessions get on a stop.", min=0)]
Metrics = Annotated[
    str,
    typer.Option(help="HOST:PORT, or a port on loopback, where Prometheus scrapes /metrics."),
]


class LogFormat(StrEnum):
    """How a daemon logs to stderr."""

    TEXT = "text"
    JSON = "json"


Logs = Annotated[LogFormat, typer.Option("--log-format", help="json: one object per line.")]


def _log_as(log_format: LogFormat, name: str) -> None:
    from collapipe_flwr.core.json_log import log_json

    if log_format is LogFormat.JSON:
        log_json(name)


def tls_files(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """All three files or none; raises ConfigError for less, so that TLS is always mutual."""
    from collapipe_flwr.core.errors import ConfigError
    from collapipe_flwr.core.links import TlsFiles

    given = {"--tls-ca": ca, "--tls-cert": certificate, "--tls-key": key}
    missing = [name for name, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(f"{missing[0]} is missing: both sides show a certificate, or none does")
    return TlsFiles(ca=ca, certificate=certificate, key=key)


def _settings(
    listen: str,
    name: str,
    cluster: list[Path] | None,
    allow: list[str] | None,
    own_tls: TlsFiles | None,
    memory_mb: float,
    default: str,
    imports: list[str] | None,
    **options: Any,
) -> HostSettings:
    """The host called ``name``; options win over what its cluster files say.

    Those are ``cluster``: files, and folders whose files count where they list this member. Raises
    ConfigError.
    """
    from collapipe_flwr.config.cluster_file import clusters_in, read_cluster
    from collapipe_flwr.host.daemon import HostSettings

    paths = cluster or []
    clusters = [read_cluster(path) for path in paths if not path.is_dir()]
    clusters += [c for path in paths if path.is_dir() for c in clusters_in(path, name)]
    address = next((a for c in clusters if (a := c.member(name).address)), default)
    tls = own_tls or next((c.tls_files(name) for c in clusters), None)
    rosters = _rosters(name, clusters, tls, allow)
    if imports:
        sys.path.insert(0, os.getcwd())  # modules may also stand where the command is given
    return HostSettings(
        listen=listen or address,
        name=name,
        tls=tls,
        rosters=rosters,
        memory_bytes=int(memory_mb * 1e6),
        imports=tuple(imports or ()),
        **options,
    )


def _rosters(
    name: str,
    clusters: list[ClusterConfig],
    tls: TlsFiles | None,
    allow: list[str] | None,
) -> Rosters | None:
    """Who may call; None where nobody is named, or nobody can prove a name."""
    from collapipe_flwr.config.access_control import access_control
    from collapipe_flwr.host.rosters import Rosters

    access_control(clusters)  # refuses a name that two clusters would share
    if tls is None or tls.ca is None or not (clusters or allow):
        return None
    return Rosters(name, clusters, tls.ca, allow or ())


def device(
    listen: Listen = "",
    name: Annotated[str, typer.Option(help="This board in certificates and errors.")] = "device",
    cluster: Cluster = None,
    allow: Allow = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    insecure: Insecure = False,
    memory_mb: MemoryMb = 0.0,
    compute: Compute = "auto",
    threads: Threads = 0,
    imports: Imports = None,
    grace_s: Grace = 10.0,
    metrics: Metrics = "",
    log_format: Logs = LogFormat.TEXT,
    cache_dir: Annotated[
        Path | None, typer.Option(help="For frozen weights. Default: in the user's cache folder.")
    ] = None,
    cache_mb: Annotated[float, typer.Option(help="At most; 0: keep none.", min=0)] = 8000.0,
    radio_interface: Annotated[
        str, typer.Option(help="Apply planned transmit power here by `iw`, as wlan0.")
    ] = "",
    energy_sensor: Annotated[
        str,
        typer.Option(
            help="Meter joules by ina3221 (Jetson), pi5-pmic or rapl (PC); auto: by the first that "
            "can be read; none: model them from times."
        ),
    ] = "auto",
) -> None:
    """Train the segments that a control unit places here until SIGTERM or Ctrl-C."""
    from collapipe_flwr.host.daemon import serve

    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    settings = _settings(
        listen,
        name,
        cluster,
        allow,
        tls_files(ca, certificate, key),
        memory_mb,
        default="127.0.0.1:50071",
        insecure=insecure,
        cache_dir=cache_dir or user_cache / "collapipe" / "frozen",
        cache_bytes=int(cache_mb * 1e6),
        radio_interface=radio_interface,
        energy_sensor=energy_sensor,
        imports=imports,
        compute=compute,
        threads=threads,
        grace_s=grace_s,
        metrics=metrics,
    )
    _log_as(log_format, name)
    serve(settings, passes_on=True, announce=lambda a: typer.echo(f"{name} on {a}"))


def edge(
    listen: Listen = "",
    name: Annotated[str, typer.Option(help="Its name in certificates.")] = "edge",
    cluster: Cluster = None,
    allow: Allow = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    insecure: Insecure = False,
    memory_mb: MemoryMb = 0.0,
    compute: Compute = "auto",
    threads: Threads = 0,
    imports: Imports = None,
    grace_s: Grace = 10.0,
    metrics: Metrics = "",
    log_format: Logs = LogFormat.TEXT,
    state_dir: Annotated[
        Path | None, typer.Option(help="Keep sessions here, so that a restart goes on with them.")
    ] = None,
) -> None:
    """Serve decoders (or heads) to clusters until SIGTERM or Ctrl-C.

    Point a run at it with the run-config key `edge.address`.
    """
    from collapipe_flwr.host.daemon import serve

    settings = _settings(
        listen,
        name,
        cluster,
        allow,
        tls_files(ca, certificate, key),
        memory_mb,
        default="127.0.0.1:50061",
        insecure=insecure,
        state_dir=state_dir,
        cache_bytes=0,
        imports=imports,
        compute=compute,
        threads=threads,
        grace_s=grace_s,
        metrics=metrics,
    )
    _log_as(log_format, name)
    serve(settings, passes_on=False, announce=lambda a: typer.echo(f"edge server on {a}"))


def control_unit(
    socket: Annotated[
        Path | None,
        typer.Option(
            help="Where ClientApps of this user find it. Default: $COLLAPIPE_CONTROL_UNIT, else "
            "in $XDG_RUNTIME_DIR/collapipe, else in /var/lib/collapipe-control-unit."
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Keep what lasts longer than a round here, unless node or run say where."
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="Seconds that a round gets on a stop.", min=0)
    ] = 10.0,
    metrics: Metrics = "",
    log_format: Logs = LogFormat.TEXT,
) -> None:
    """Stay beside a SuperNode and work on its messages, until SIGTERM or Ctrl-C.

    It keeps what a ClientApp, which Flower starts anew for every message, would load again. It runs
    the app of the run, from the files that Flower installed. Without it, ClientApps do all
    themselves.
    """
    from collapipe_flwr.federation.client.local_socket import default_path
    from collapipe_flwr.federation.client.resident import ResidentSettings, serve

    settings = ResidentSettings(
        path=socket or default_path(), state_dir=state_dir, grace_s=grace_s, metrics=metrics
    )
    _log_as(log_format, "control-unit")
    serve(settings, lambda path: typer.echo(f"control unit at {path}"))


def supernode(context: typer.Context) -> None:
    """Run Flower's SuperNode, which looks for messages more often while there are some.

    All arguments are those of `flower-supernode`.
    """
    from collapipe_flwr.federation.client.supernode import run

    run(context.args)
