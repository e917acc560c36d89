"""``collapipe edge``, ``device``, ``control-unit``, ``supernode``: daemons of edge and boards."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from collapipe_flwr.core.errors import ConfigError, prefix_errors
from collapipe_flwr.core.json_log import log_json
from collapipe_flwr.core.links import TlsFiles, add_port, split_address

if TYPE_CHECKING:
    from collapipe_flwr.config.cluster_file import ClusterConfig
    from collapipe_flwr.host.daemon import HostSettings

Listen = Annotated[
    str, Option(help="HOST:PORT; port 0 takes a free one. Default: that of --cluster.")
]
Cluster = Annotated[
    list[Path] | None,
    Option(help="Cluster files (TOML), or a folder of them: address, TLS, who may call."),
]
Allow = Annotated[
    list[str] | None,
    Option(help="Common names of certificates that may call, besides the clusters'."),
]
Ca = Annotated[
    Path | None, Option("--tls-ca", help="PEM of the CA that signs the peers' certificates.")
]
Certificate = Annotated[Path | None, Option("--tls-cert", help="PEM of our certificate.")]
Key = Annotated[Path | None, Option("--tls-key", help="PEM of its private key.")]
MemoryMb = Annotated[
    float,
    Option(
        help="Megabytes for all models, without activations; 0: all that is free.",
        min=0,
    ),
]
Threads = Annotated[int, Option(help="Threads to compute with; 0: one per core.", min=0)]
Compute = Annotated[
    str,
    Option(help="Where to compute: cpu, cuda, cuda:N, mps, xpu; auto: cuda or xpu, else cpu."),
]
Insecure = Annotated[bool, Option(help="Allow unencrypted connections on non-loopback addresses.")]
Imports = Annotated[
    list[str] | None,
    Option(
        "--import",
        metavar="MODULE",
        help="Accept own models and losses from this module or package; may be repeated.",
    ),
]
Grace = Annotated[float, Option(help="Seconds for open sessions to finish on a stop.", min=0)]
Metrics = Annotated[
    str,
    Option(help="HOST:PORT, or a port on loopback, where Prometheus scrapes /metrics."),
]


class LogFormat(StrEnum):
    """How a daemon logs to stderr."""

    TEXT = "text"
    JSON = "json"


Dial = Annotated[
    str,
    Option(
        metavar="CONTROL_UNIT[:PORT]",
        help="Accept no connections; dial the control unit, which relays those of the cluster. "
        "Default: as the cluster file says.",
    ),
]
Logs = Annotated[LogFormat, Option("--log-format", help="text, or json: one object per line.")]


def tls_files(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """Return all three files or none; raises ConfigError for less, so that TLS is mutual."""
    given = {"--tls-ca": ca, "--tls-cert": certificate, "--tls-key": key}
    missing = [name for name, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(f"{missing[0]} is missing: both sides show a certificate, or none does")
    return TlsFiles(ca=ca, certificate=certificate, key=key)


def _read_settings(default: str, options: dict[str, Any], **more: Any) -> HostSettings:
    """Build host settings from a command's ``options``, which win over its cluster files.

    Of a folder in ``cluster``, the files that list this member count. ``default`` is where it
    listens when nothing says so. Raises ConfigError.
    """
    from collapipe_flwr.config.access_control import access_control
    from collapipe_flwr.config.cluster_file import read_cluster, read_clusters
    from collapipe_flwr.host.daemon import HostSettings
    from collapipe_flwr.host.rosters import Rosters

    name, paths = options["name"], options["cluster"] or []
    own_tls = tls_files(options["ca"], options["certificate"], options["key"])
    clusters = [read_cluster(path) for path in paths if not path.is_dir()]
    clusters += [c for path in paths if path.is_dir() for c in read_clusters(path, name)]
    with prefix_errors("--name"):
        address = next((a for c in clusters if (a := c.member(name).address)), default)
    tls = own_tls or next((c.tls_files(name) for c in clusters), None)
    dial, unit = _read_dial(name, clusters, options.get("dial", ""))
    access_control(clusters)  # refuses a name that two clusters would share
    rosters, allow = None, options["allow"] or ()
    if tls is not None and tls.ca is not None and (clusters or allow):
        rosters = Rosters(name, clusters, tls.ca, allow)
    if options["imports"]:
        sys.path.insert(0, os.getcwd())  # modules may also stand where the command is given
    same = ("insecure", "compute", "threads", "grace_s", "metrics")
    return HostSettings(
        listen=options["listen"] or ("127.0.0.1:0" if dial else address),
        dial=dial,
        unit=unit,
        name=name,
        tls=tls,
        rosters=rosters,
        memory_bytes=int(options["memory_mb"] * 1e6),
        imports=tuple(options["imports"] or ()),
        **{key: options[key] for key in same},
        **more,
    )


def _read_dial(name: str, clusters: list[ClusterConfig], asked: str) -> tuple[str, str]:
    """Return where a device dials its control unit, and its name; empty if it listens.

    Raises ConfigError if ``asked`` to dial where its cluster would not look for it.
    """
    from collapipe_flwr.config.cluster_file import RELAY_PORT

    found = next((c for c in clusters if c.member(name).dials), None)
    if found is None:
        if asked:
            raise ConfigError(
                f"--dial {asked}: no file given by --cluster says `dials = true` of {name}, so "
                "others would not look for it there: `collapipe join TOKEN --dial` sees to it"
            )
        return "", ""
    dial = add_port(asked, RELAY_PORT) if asked else found.relay_address
    with prefix_errors("--dial"):
        split_address(dial)
    return dial, found.control_unit.name


def device(
    listen: Listen = "",
    name: Annotated[str, Option(help="Name of this board in certificates and errors.")] = "device",
    dial: Dial = "",
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
        Path | None, Option(help="Folder for frozen weights. Default: in the user's cache folder.")
    ] = None,
    cache_mb: Annotated[
        float, Option(help="Megabytes of frozen weights to keep at most; 0: none.", min=0)
    ] = 8000.0,
    radio_interface: Annotated[
        str, Option(help="Set planned transmit power on this interface by `iw`, such as wlan0.")
    ] = "",
    energy_sensor: Annotated[
        str,
        Option(
            help="Meter joules by ina3221 (Jetson), pi5-pmic or rapl (PC); auto: by the first that "
            "can be read; none: model them from times."
        ),
    ] = "auto",
) -> None:
    """Train the segments that a control unit places here until SIGTERM or Ctrl-C."""
    options = dict(locals())  # by name, as they were given
    from collapipe_flwr.host.daemon import serve

    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    settings = _read_settings(
        "127.0.0.1:50071",
        options,
        cache_dir=cache_dir or user_cache / "collapipe" / "frozen",
        cache_bytes=int(cache_mb * 1e6),
        radio_interface=radio_interface,
        energy_sensor=energy_sensor,
    )
    if log_format is LogFormat.JSON:
        log_json(name)
    serve(settings, passes_on=True, announce=lambda a: typer.echo(f"{name} on {a}"))


def edge(
    listen: Listen = "",
    name: Annotated[str, Option(help="Name in certificates.")] = "edge",
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
) -> None:
    """Serve decoders (or heads) to clusters until SIGTERM or Ctrl-C.

    Clusters find it by the [edge] of their cluster file, else by the run-config key `edge.address`.
    """
    options = dict(locals())  # by name, as they were given
    from collapipe_flwr.host.daemon import serve

    settings = _read_settings("127.0.0.1:50061", options, cache_bytes=0)
    if log_format is LogFormat.JSON:
        log_json(name)
    serve(settings, passes_on=False, announce=lambda a: typer.echo(f"edge server on {a}"))


def control_unit(
    socket: Annotated[
        Path | None,
        Option(
            help="Socket to which ClientApps of this user connect. Default: "
            "$COLLAPIPE_CONTROL_UNIT, else in $XDG_RUNTIME_DIR/collapipe, else in "
            "/var/lib/collapipe-control-unit."
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        Option(help="Folder for what outlasts a round, unless the node or the run names one."),
    ] = None,
    grace_s: Annotated[
        float, Option(help="Seconds for a round to finish on a stop.", min=0)
    ] = 10.0,
    metrics: Metrics = "",
    log_format: Logs = LogFormat.TEXT,
) -> None:
    """Process the messages of a SuperNode on this machine, until SIGTERM or Ctrl-C.

    It keeps in memory what a ClientApp, which Flower starts for every message, would load again.
    It runs the app of the run, from the files that Flower installed. Without it, each
    ClientApp does the work itself.
    """
    from collapipe_flwr.federation.client.local_socket import default_path
    from collapipe_flwr.federation.client.resident import ResidentSettings, serve

    settings = ResidentSettings(
        path=socket or default_path(), state_dir=state_dir, grace_s=grace_s, metrics=metrics
    )
    if log_format is LogFormat.JSON:
        log_json("control-unit")
    serve(settings, lambda path: typer.echo(f"control unit at {path}"))


def supernode(context: typer.Context) -> None:
    """Run Flower's SuperNode, which polls for messages more often while there are some.

    All arguments are those of `flower-supernode`.
    """
    from collapipe_flwr.federation.client.supernode import run

    run(context.args)
