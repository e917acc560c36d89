"""``collapipe chat`` and ``serve``: conversations with an instruct model over a cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from collapipe_flwr.cli.generate import (
    At,
    CertificateName,
    ClusterFile,
    Devices,
    EdgeAddress,
    EdgeBlocks,
    MaxNewTokens,
    Sample,
    Seed,
    Slots,
    Temperature,
    TopK,
    TopP,
    check_addresses,
    open_generator,
)
from collapipe_flwr.cli.hosting import Ca, Certificate, Compute, Insecure, Key, tls_files
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import TlsFiles, is_loopback
from collapipe_flwr.core.processes import stop_on_signals
from collapipe_flwr.generation.source import find_model

if TYPE_CHECKING:
    from collapipe_flwr.config.cluster_file import ClusterConfig
    from collapipe_flwr.transport.generation import Write

_RUN = "Run directory, or a folder with a transformers model."
Token = Annotated[
    str | None,
    Option(
        envvar="COLLAPIPE_TOKEN",
        help="API key for clients. Default: a new one, printed at the start.",
    ),
]


def chat(
    run: Annotated[str | None, Argument(help=_RUN)] = None,
    system: Annotated[str, Option(help="Message of the system before all others.")] = "",
    max_new_tokens: MaxNewTokens = 0,
    sample: Sample = None,
    temperature: Temperature = 0,
    top_k: TopK = 0,
    top_p: TopP = 0,
    seed: Seed = None,
    devices: Devices = 2,
    compute: Compute = "auto",
    edge_blocks: EdgeBlocks = 0,
    cluster: ClusterFile = None,
    edge: EdgeAddress = "",
    at: At = "",
    certificate_name: CertificateName = "",
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """Talk to an instruct model in the terminal; through a pipe, one answer per line.

    Without --cluster, everything runs in this process, cut as on a cluster. Ctrl-C stops an answer.
    """
    check_addresses(at=at, edge=edge)
    if (run is None) == (not at):
        raise ConfigError("name either RUN, a run directory, or a server with --at")
    if run is not None:
        find_model(run)
    from collapipe_flwr.generation.conversation import Conversation, converse
    from collapipe_flwr.transport.generation import GenerateRequest, TextClient

    blank = GenerateRequest(
        max_new_tokens=max_new_tokens,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    tls = tls_files(ca, certificate, key)

    @contextmanager
    def writing() -> Iterator[Write]:
        if at:
            with TextClient(at, tls=tls, certificate_name=certificate_name) as client:
                yield client.write
            return
        assert run is not None
        with open_generator(
            run,
            _read(cluster),
            devices=devices,
            compute=compute,
            edge=edge,
            edge_blocks=edge_blocks,
            slots=1,
            chats=True,
        ) as writer:
            yield writer.write

    with writing() as write:
        converse(Conversation(write, blank, system))


def serve(
    run: Annotated[str, Argument(help=_RUN)],
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0: a free one.", min=0, max=65535)] = 8000,
    token: Token = None,
    slots: Slots = 4,
    devices: Devices = 2,
    compute: Compute = "auto",
    edge_blocks: EdgeBlocks = 0,
    cluster: ClusterFile = None,
    edge: EdgeAddress = "",
    certificate: Certificate = None,
    key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Serve an instruct model to OpenAI's clients: /v1/chat/completions and /v1/models.

    Without --cluster, everything runs in this process, cut as on a cluster.
    """
    check_addresses(edge=edge)
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ConfigError("--token must be printable ASCII: leave it out to have one drawn")
    if (certificate is None) != (key is None):
        raise ConfigError("HTTPS needs both --tls-cert and --tls-key")
    if certificate is None and not is_loopback(host) and not insecure:
        raise ConfigError(
            f"--host {host} without TLS would show token and texts to the network: give --tls-cert "
            "and --tls-key, put a proxy with TLS in front, or say --insecure"
        )
    find_model(run)
    from collapipe_flwr.generation.chat_server import ChatServer

    tls = None if certificate is None else TlsFiles(certificate=certificate, key=key)
    place = open_generator(
        run,
        _read(cluster),
        devices=devices,
        compute=compute,
        edge=edge,
        edge_blocks=edge_blocks,
        slots=slots,
        chats=True,
    )
    with (
        place as writer,
        stop_on_signals() as signalled,
        ChatServer(
            host,
            port,
            writer.write,
            model=Path(run).resolve().name if Path(run).exists() else run,
            token=token or (drawn := secrets.token_urlsafe(24)),
            most=slots,
            tls=tls,
        ) as server,
    ):
        typer.echo(f"chat server on {server.url}")
        if not token:
            typer.echo(f"token: {drawn}")
        signalled.wait()


def _read(cluster: Path | None) -> ClusterConfig | None:
    from collapipe_flwr.config.cluster_file import read_cluster

    return None if cluster is None else read_cluster(cluster)
