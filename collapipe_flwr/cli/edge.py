"""``collapipe edge``: the server of decoders and heads."""

from __future__ import annotations

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
    StateDir,
    Threads,
    membership,
    memory_bytes,
    tls_files,
)


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
    threads: Threads = 0,
    grace_s: Grace = 10.0,
    state_dir: StateDir = None,
) -> None:
    """Serve decoders (or heads) to clusters until SIGTERM or Ctrl-C.

    Point a run at it with the run-config key `edge.address`.
    """
    from collapipe_flwr.host.daemon import HostSettings, serve

    member = membership(name, cluster, allow, tls_files(ca, certificate, key))
    settings = HostSettings(
        listen=listen or member.address or "127.0.0.1:50061",
        name=name,
        tls=member.tls,
        insecure=insecure,
        roster=member.roster,
        state_dir=state_dir,
        cache_bytes=0,
        memory_bytes=memory_bytes(memory_mb),
        threads=threads,
        grace_s=grace_s,
    )
    serve(settings, passes_on=False, announce=lambda a: typer.echo(f"edge server on {a}"))
