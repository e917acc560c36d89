"""``collapipe device``: the daemon of one board."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from collapipe_flwr.cli.hosting import (
    Allow,
    Ca,
    Certificate,
    Cluster,
    Grace,
    Insecure,
    Key,
    Listen,
    MemoryMb,
    Threads,
    membership,
    memory_bytes,
    tls_files,
)


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
    threads: Threads = 0,
    grace_s: Grace = 10.0,
    cache_dir: Annotated[
        Path | None, typer.Option(help="For frozen weights. Default: in the user's cache folder.")
    ] = None,
    cache_mb: Annotated[float, typer.Option(help="At most; 0: keep none.", min=0)] = 8000.0,
    radio_interface: Annotated[
        str, typer.Option(help="Apply planned transmit power here by `iw`, as wlan0.")
    ] = "",
) -> None:
    """Train the segments that a control unit places here until SIGTERM or Ctrl-C."""
    from collapipe_flwr.host.daemon import HostSettings, serve

    member = membership(name, cluster, allow, tls_files(ca, certificate, key))
    settings = HostSettings(
        listen=listen or member.address or "127.0.0.1:50071",
        name=name,
        tls=member.tls,
        insecure=insecure,
        roster=member.roster,
        cache_dir=cache_dir or _cache_folder(),
        cache_bytes=int(cache_mb * 1e6),
        memory_bytes=memory_bytes(memory_mb),
        radio_interface=radio_interface,
        threads=threads,
        grace_s=grace_s,
    )
    serve(settings, passes_on=True, announce=lambda a: typer.echo(f"{name} on {a}"))


def _cache_folder() -> Path:
    """Where programs of this user keep what they could get again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "collapipe" / "frozen"
