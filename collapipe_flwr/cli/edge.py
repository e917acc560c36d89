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
    Hosting,
    Insecure,
    Key,
    Listen,
    MemoryMb,
    StateDir,
    Threads,
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
    from collapipe_flwr.host.daemon import serve

    settings = Hosting(
        name=name,
        listen=listen,
        fallback="127.0.0.1:50061",
        clusters=cluster,
        allow=allow,
        ca=ca,
        certificate=certificate,
        key=key,
        insecure=insecure,
        grace_s=grace_s,
        memory_mb=memory_mb,
        threads=threads,
        state_dir=state_dir,
    ).settings()
    serve(settings, passes_on=False, announce=lambda a: typer.echo(f"edge server on {a}"))
