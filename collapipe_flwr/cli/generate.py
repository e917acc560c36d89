"""``collapipe generate``: texts by a trained model, its lower part on the devices of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collapipe_flwr.cli.hosting import Allow, Ca, Certificate, Key, tls_files
from collapipe_flwr.core.errors import ConfigError

if TYPE_CHECKING:
    from collapipe_flwr.config.access_control import AccessControl
    from collapipe_flwr.core.links import TlsFiles
    from collapipe_flwr.transport.generation import GenerateRequest, Write


def generate(
    run: Annotated[
        Path | None, typer.Option(help="Run directory, or a folder with a transformers model.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="Prompt; may be repeated.")] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(help="Sound (.wav, .npy) for a speech model.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="0: the model's default.", min=0)] = 0,
    num_beams: Annotated[int, typer.Option(help="0: the model's default.", min=0)] = 0,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Default: the model's setting.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: the model's.", min=0)
    ] = 0,
    top_k: Annotated[int, typer.Option(help="Sample from the K most likely tokens.", min=0)] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from this probability mass.", min=0, max=1)
    ] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.", min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    stream: Annotated[bool, typer.Option(help="Print pieces as they are generated.")] = False,
    devices: Annotated[int, typer.Option(help="Number of threads that act as devices.", min=1)] = 2,
    edge_blocks: Annotated[
        int, typer.Option(help="Upper blocks at the edge (decoder-only models).", min=0)
    ] = 0,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file; generate on its daemons.")
    ] = None,
    edge: Annotated[str, typer.Option(help="HOST:PORT of the edge. Default: --cluster's.")] = "",
    slots: Annotated[
        int, typer.Option(help="Texts generated at the same time.", min=1, max=64)
    ] = 4,
    listen: Annotated[str, typer.Option(help="HOST:PORT to serve clients on.")] = "",
    at: Annotated[str, typer.Option(help="HOST:PORT of a server started with --listen.")] = "",
    certificate_name: Annotated[
        str, typer.Option(help="Name in the certificate of --at's server. Default: its host.")
    ] = "",
    allow: Allow = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """Generate the continuation, translation or summary of each text.

    Without --cluster, everything runs in this process, cut as on a cluster. With --listen, the
    model is loaded once and serves many clients; --at sends texts to such a server.
    """
    from collapipe_flwr.transport.generation import GenerateRequest, TextClient

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
    requests = [replace(blank, text=each) for each in text or ()]
    requests += [replace(blank, sound=_sound(path)) for path in audio or ()]
    tls = tls_files(ca, certificate, key)
    if not requests and not listen:
        raise ConfigError('--text is missing: give --text "...", or --listen to serve clients')
    if at:
        with TextClient(at, tls=tls, certificate_name=certificate_name) as client:
            _print(client.write, requests, stream, slots)
        return
    if run is None:
        raise ConfigError("--run is missing: name a run directory, or a server with --at")
    serving = _Serving(listen=listen, slots=slots, tls=tls, access=_access(cluster, allow))
    if allow and tls is None:
        raise ConfigError("--allow needs TLS: only a peer with a certificate can be told apart")
    serving.check()
    with _writing(run, edge_blocks, devices, cluster, edge, slots) as write:
        _print(write, requests, stream, slots)
        if listen:
            serving.run(write)


@contextmanager
def _writing(
    run: Path, edge_blocks: int, devices: int, cluster: Path | None, edge: str, slots: int
) -> Iterator[Write]:
    from collapipe_flwr.config.cluster_file import read_cluster
    from collapipe_flwr.generation.text_generator import cluster_generator, local_generator
    from collapipe_flwr.generation.text_model import TextModel

    model = TextModel.load(run, edge_blocks=edge_blocks)
    place = (
        local_generator(model, devices=devices, slots=slots)
        if cluster is None
        else cluster_generator(model, read_cluster(cluster), edge_address=edge, slots=slots)
    )
    with place as writer:
        yield writer.write


def _print(write: Write, requests: list[GenerateRequest], stream: bool, slots: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    if stream:
        for request in requests:
            for piece in write(request):
                typer.echo(piece, nl=False)
            typer.echo()
        return
    with ThreadPoolExecutor(slots) as pool:
        for written in pool.map(lambda request: "".join(write(request)), requests):
            typer.echo(written)


def _access(cluster: Path | None, allow: list[str] | None) -> AccessControl | None:
    """Who may ask for texts over TLS; None where nobody was named."""
    from collapipe_flwr.config.access_control import access_control
    from collapipe_flwr.config.cluster_file import read_cluster

    access = access_control([] if cluster is None else [read_cluster(cluster)], allow or ())
    return access if access.callers else None


def _sound(path: Path) -> str:
    import base64

    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"--audio {path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    """A server of texts, as the user typed it."""

    listen: str
    slots: int
    tls: TlsFiles | None
    access: AccessControl | None

    def check(self) -> None:
        """Before a model is loaded; raises ConfigError."""
        from collapipe_flwr.host.daemon import is_loopback

        if self.listen and self.tls is None and not is_loopback(self.listen):
            raise ConfigError(
                f"--listen {self.listen} without TLS would let anybody in the network use the "
                "model: give --tls-ca, --tls-cert and --tls-key"
            )

    def run(self, write: Write) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        from collapipe_flwr.core.processes import stopping
        from collapipe_flwr.transport.generation import TextServer

        access = self.access if self.tls is not None else None
        server = TextServer(self.listen, write, most=self.slots, tls=self.tls, access=access)
        with stopping() as stop, server:
            typer.echo(f"text server on {server.address}")
            stop.wait()
