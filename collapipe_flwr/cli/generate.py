"""``collapipe generate``, ``chat`` and ``serve``: texts by a trained model over a cluster."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from collapipe_flwr.cli.hosting import Allow, Ca, Certificate, Compute, Insecure, Key, tls_files
from collapipe_flwr.core.errors import ConfigError, prefix_errors
from collapipe_flwr.core.links import TlsFiles, is_loopback, split_address
from collapipe_flwr.core.processes import stop_on_signals
from collapipe_flwr.generation.source import find_model

if TYPE_CHECKING:
    from collapipe_flwr.config.access_control import AccessControl
    from collapipe_flwr.config.cluster_file import ClusterConfig
    from collapipe_flwr.generation.text_generator import TextGenerator
    from collapipe_flwr.transport.generation import GenerateRequest, Write

_RUN = "Run directory, or a folder with a transformers model."
ApiKey = Annotated[
    str | None,
    Option(
        envvar="COLLAPIPE_TOKEN",
        help="API key for clients. Default: a new one, printed at the start.",
    ),
]
MaxNewTokens = Annotated[int, Option(help="Most new tokens; 0: the model's default.", min=0)]
Sample = Annotated[
    bool | None,
    Option("--sample/--greedy", help="Sample, or take the likeliest token. Default: the model's."),
]
Temperature = Annotated[float, Option(help="Sampling temperature; 0: the model's.", min=0)]
TopK = Annotated[int, Option(help="Sample from the K most likely tokens.", min=0)]
TopP = Annotated[float, Option(help="Sample from this probability mass.", min=0, max=1)]
Seed = Annotated[int | None, Option(help="Makes sampling reproducible.", min=0)]
Devices = Annotated[int, Option(help="Number of threads that act as devices.", min=1)]
EdgeBlocks = Annotated[int, Option(help="Upper blocks at the edge (decoder-only models).", min=0)]
ClusterFile = Annotated[Path | None, Option(help="Cluster file; generate on its daemons.")]
EdgeAddress = Annotated[str, Option(help="HOST:PORT of the edge. Default: --cluster's.")]
Slots = Annotated[int, Option(help="Texts generated at the same time.", min=1, max=64)]
At = Annotated[str, Option(help="HOST:PORT of a server started with --listen.")]
CertificateName = Annotated[
    str, Option(help="Name in the certificate of --at's server. Default: its host.")
]


def generate(
    # no path, which would forget that ./name is one
    run: Annotated[str | None, Option(help=_RUN)] = None,
    text: Annotated[list[str] | None, Option(help="Prompt; may be repeated.")] = None,
    chat: Annotated[
        bool, Option("--chat", help="Each text is a message to an instruct model.")
    ] = False,
    audio: Annotated[
        list[Path] | None, Option(help="Sound (.wav, .npy) for a speech model.")
    ] = None,
    max_new_tokens: MaxNewTokens = 0,
    num_beams: Annotated[int, Option(help="Width of beam search; 0: the model's.", min=0)] = 0,
    sample: Sample = None,
    temperature: Temperature = 0,
    top_k: TopK = 0,
    top_p: TopP = 0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, Option(help="Stop string; may be repeated.")] = None,
    stream: Annotated[bool, Option(help="Print pieces as they are generated.")] = False,
    devices: Devices = 2,
    compute: Compute = "auto",
    edge_blocks: EdgeBlocks = 0,
    cluster: ClusterFile = None,
    edge: EdgeAddress = "",
    slots: Slots = 4,
    listen: Annotated[str, Option(help="HOST:PORT to serve clients on.")] = "",
    at: At = "",
    certificate_name: CertificateName = "",
    allow: Allow = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """Generate the continuation, translation or summary of each text.

    Without --cluster, everything runs in this process, cut as on a cluster. With --listen, the
    model is loaded once and serves many clients; --at sends texts to such a server.
    """
    _check_addresses(listen=listen, at=at, edge=edge)
    if not (text or audio or listen):
        raise ConfigError('--text is missing: give --text "...", or --listen to serve clients')
    if not all(each.strip() for each in text or ()):
        raise ConfigError("--text is empty: give some words to start from")
    if stop and num_beams > 1:
        raise ConfigError("--stop needs --num-beams 1: beams know their text at its end only")
    if run is None and not at:
        raise ConfigError("--run is missing: name a run directory, or a server with --at")
    if run is not None and not at:
        find_model(run)
    from collapipe_flwr.transport.generation import (
        USER,
        ChatMessage,
        GenerateRequest,
        TextClient,
        TextServer,
    )

    blank = GenerateRequest(
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    requests = [
        replace(blank, messages=(ChatMessage(USER, each),)) if chat else replace(blank, text=each)
        for each in text or ()
    ]
    requests += [replace(blank, sound=_read_sound(path)) for path in audio or ()]
    tls = tls_files(ca, certificate, key)
    if at:
        with TextClient(at, tls=tls, certificate_name=certificate_name) as client:
            _print(client.write, requests, stream, slots)
        return
    assert run is not None
    config = _read_file(cluster)
    access = _read_access(config, allow, listen, tls)
    place = _open_generator(
        run,
        config,
        devices=devices,
        compute=compute,
        edge=edge,
        edge_blocks=edge_blocks,
        slots=slots,
    )
    with place as writer:
        _print(writer.write, requests, stream, slots)
        if listen:
            server = TextServer(listen, writer.write, most=slots, tls=tls, access=access)
            with stop_on_signals() as signalled, server:
                typer.echo(f"text server on {server.address}")
                signalled.wait()


def _check_addresses(**addresses: str) -> None:
    """Raise ConfigError, with the option's name, for one that is given and no HOST:PORT."""
    for option, address in addresses.items():
        with prefix_errors(f"--{option}"):
            if address:
                split_address(address, least=0 if option == "listen" else 1)


@contextmanager
def _open_generator(
    run: str,
    cluster: ClusterConfig | None,
    *,
    devices: int,
    compute: str,
    edge: str,
    edge_blocks: int,
    slots: int,
    chats: bool = False,
) -> Iterator[TextGenerator]:
    """Load a model, which must have a chat template if it ``chats``, and build its chain."""
    from transformers.utils.logging import disable_progress_bar

    from collapipe_flwr.generation.text_generator import text_generator
    from collapipe_flwr.generation.text_model import TextModel

    disable_progress_bar()  # type: ignore[no-untyped-call]  # it would surround the answer
    model = TextModel.load(run, edge_blocks=edge_blocks)
    if chats:
        model.check_chat()
    with text_generator(
        model, cluster, devices=devices, edge_address=edge, slots=slots, compute=compute
    ) as writer:
        yield writer


def _print(write: Write, requests: list[GenerateRequest], stream: bool, slots: int) -> None:
    if stream:
        for request in requests:
            for piece in write(request):
                typer.echo(piece, nl=False)
            typer.echo()
        return
    with ThreadPoolExecutor(slots) as pool:
        for written in pool.map(lambda request: "".join(write(request)), requests):
            typer.echo(written)


def _read_access(
    config: ClusterConfig | None, allow: list[str] | None, listen: str, tls: TlsFiles | None
) -> AccessControl | None:
    """Return who may ask a server for texts; None: all with a certificate. Raises ConfigError."""
    from collapipe_flwr.config.access_control import access_control

    access = access_control([] if config is None else [config], allow or ())
    if allow and tls is None:
        raise ConfigError("--allow needs TLS: only a peer with a certificate can be told apart")
    if listen:
        with prefix_errors("--listen"):
            host, _ = split_address(listen, least=0)
        if tls is None and not is_loopback(host):
            raise ConfigError(
                f"--listen {listen} without TLS would let anybody in the network use the "
                "model: give --tls-ca, --tls-cert and --tls-key"
            )
    return access if tls and access.callers else None


def _read_sound(path: Path) -> str:
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"--audio {path} cannot be read: {error.strerror}") from error


def chat(
    run: Annotated[str | None, Argument(help=_RUN)] = None,
    system: Annotated[str, Option(help="System message ahead of all others.")] = "",
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
    _check_addresses(at=at, edge=edge)
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
        with _open_generator(
            run,
            _read_file(cluster),
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
    port: Annotated[int, Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = 8000,
    token: ApiKey = None,
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
    _check_addresses(edge=edge)
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
    place = _open_generator(
        run,
        _read_file(cluster),
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


def _read_file(cluster: Path | None) -> ClusterConfig | None:
    from collapipe_flwr.config.cluster_file import read_cluster

    return None if cluster is None else read_cluster(cluster)
