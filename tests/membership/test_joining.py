"""Who is let in by a token, and who is not; keys stay where they were made."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

from collapipe_flwr.cli import app
from collapipe_flwr.cli import joining as cli
from collapipe_flwr.cluster.profile import Measured, profile_cluster
from collapipe_flwr.config.access_control import SERVICE_NAME, access_control
from collapipe_flwr.config.cluster_file import MemberConfig, Role
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.core.version import read_own_version
from collapipe_flwr.membership import admission, newcomer
from collapipe_flwr.membership.admission import (
    MESSAGE_BYTES,
    MOST_REFUSALS,
    JoinAttempts,
    JoiningService,
    admit,
)
from collapipe_flwr.membership.members import RosterSender
from collapipe_flwr.membership.newcomer import Membership, find_membership, forget, join
from collapipe_flwr.membership.registry import Registry, issue_token
from collapipe_flwr.membership.tokens import JoinRefused, parse_token
from collapipe_flwr.transport.joining import JOIN, JoinRequest, load_or_make_key, make_request
from collapipe_flwr.transport.methods import make_name_options
from collapipe_flwr.transport.server import Server
from tests.membership.clusters import (
    ID,
    board,
    joined,
    measured,
    names,
    new_registry,
    print_token,
)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return new_registry(tmp_path / "cu")


def test_a_board_becomes_a_member_and_its_key_stays_with_it(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    newcomer = board(tmp_path, "pi-1")
    found = joined(joining, print_token(registry), newcomer)
    assert (found.cluster.id, found.name, found.role) == (ID, "pi-1", Role.DEVICE)
    assert found.cluster == replace(registry.cluster(), **_own_paths(found.cluster))
    assert find_membership(newcomer, bytes.fromhex(_pin(registry))) == found
    key = newcomer.own("key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    secret = key.read_text().splitlines()[1]
    for path in filter(Path.is_file, (tmp_path / "cu").rglob("*")):
        assert secret not in path.read_text(), path


def test_a_member_does_not_join_in_the_folder_that_keeps_the_cluster(
    registry: Registry, joining: JoiningService
) -> None:
    here = replace(board(registry.folder, "pi-1"), folder=registry.folder)
    with pytest.raises(ConfigError, match="keeps the cluster itself: choose another folder"):
        joined(joining, print_token(registry), here)


def test_plans_know_what_a_board_measured_of_itself(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    joined(joining, print_token(registry), board(tmp_path, "pi-1"))
    (device,) = profile_cluster(registry.cluster(), 1).devices
    assert (device.speed_flop_per_s, device.memory_bytes) == (7e9, 10**9)
    assert (device.device_id, device.overhead_s) == (f"{ID}/pi-1", 0.01)


def test_a_token_admits_as_many_as_it_was_made_for_even_at_once(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    token = print_token(registry, members=2)
    boards = [board(tmp_path, f"pi-{n}", 1000 + n) for n in range(4)]

    def attempt(newcomer) -> str:
        try:
            return joined(joining, token, newcomer).name
        except LinkError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(attempt, boards))
    assert sum(text.startswith("pi-") for text in said) == 2
    assert sum("the token is used up (it was made for 2)" in text for text in said) == 2
    assert names(registry.cluster()) == {text for text in said if text.startswith("pi-")}


def test_an_expired_token_is_refused(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    token = print_token(registry, minutes=0)
    with pytest.raises(LinkError, match="the token has expired: print another one"):
        joined(joining, token, board(tmp_path, "pi-1"))
    assert not registry.cluster().devices


def test_a_token_does_not_live_longer_by_a_clock_that_is_put_back(
    tmp_path: Path, registry: Registry
) -> None:
    token = print_token(registry)
    past_s = time.time() - 3600
    asked = request(tmp_path, token, "pi-1", unix_s=past_s)
    with pytest.raises(JoinRefused, match="clock was put back since the token was made"):
        admit(registry, asked, clock=lambda: past_s)


def test_a_board_whose_clock_is_wrong_hears_it_and_may_use_the_token_later(
    tmp_path: Path, registry: Registry
) -> None:
    token = print_token(registry)
    asked = request(tmp_path, token, "pi-1", unix_s=0.0)
    with pytest.raises(JoinRefused, match=r"the clock of pi-1 is \d+ h off the control unit's"):
        admit(registry, asked)
    assert admit(registry, replace(asked, unix_s=time.time())).cluster_id == ID


def test_who_only_asks_is_refused_as_others_and_changes_nothing(
    tmp_path: Path, registry: Registry
) -> None:
    token = print_token(registry)
    asked = replace(request(tmp_path, token, "pi-1"), only_asks=True)
    before = {path: path.read_bytes() for path in registry.folder.rglob("*") if path.is_file()}
    assert admit(registry, asked) is None
    with pytest.raises(JoinRefused, match="not known"):
        admit(registry, replace(asked, secret="00" * 16))
    with pytest.raises(JoinRefused, match="called"):
        admit(registry, replace(asked, name="Cu-Shed"))
    after = {path: path.read_bytes() for path in registry.folder.rglob("*") if path.is_file()}
    assert after == before


def test_nothing_is_measured_of_a_board_that_is_refused(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    token = replace(print_token(registry), secret=bytes(16))
    measured_names: list[str] = []

    def measure(name: str) -> Measured:
        measured_names.append(name)
        return measured(name)

    with pytest.raises(LinkError, match="not known"):
        join(token, board(tmp_path, "pi-1"), measure, address=joining.address)
    assert not measured_names


def test_a_board_waits_for_a_control_unit_that_is_starting(
    tmp_path: Path, registry: Registry
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    token, newcomer, said = print_token(registry), board(tmp_path, "pi-1"), list[str]()
    with pytest.raises(LinkError, match="no control unit answers"):
        join(token, newcomer, measured, address=address)  # without patience
    with ExitStack() as stack:

        def start(text: str) -> None:
            said.append(text)
            stack.enter_context(JoiningService(registry, address))

        found = join(token, newcomer, measured, address=address, patience_s=60.0, say=start)
    assert found.name == "pi-1" and len(said) == 1 and address in said[0]


@pytest.mark.parametrize("version", ["0.9.9", ""])
def test_a_board_of_another_version_hears_it_and_may_use_the_token_later(
    tmp_path: Path, registry: Registry, version: str
) -> None:
    token = print_token(registry)
    asked = request(tmp_path, token, "pi-1")
    with pytest.raises(JoinRefused, match=r"pi-1 runs .*the control unit version") as refused:
        admit(registry, replace(asked, version=version))
    assert version in str(refused.value) and read_own_version() in str(refused.value)
    assert not registry.cluster().devices
    assert admit(registry, asked).cluster_id == ID


def test_a_token_that_expired_stays_so_when_the_clock_is_put_back(
    tmp_path: Path, registry: Registry
) -> None:
    token = print_token(registry)
    made_s = time.time()
    with pytest.raises(JoinRefused, match="the token has expired"):
        late_s = made_s + 3700
        admit(registry, request(tmp_path, token, "pi-1", late_s), clock=lambda: late_s)
    with pytest.raises(JoinRefused, match="the token has expired"):
        admit(registry, request(tmp_path, token, "pi-1"))


@pytest.mark.parametrize(
    "does",
    [
        print_token,
        lambda registry: RosterSender(registry).look(),
        lambda registry: CliRunner().invoke(
            app, ["cluster", "status", f"--folder={registry.folder}"]
        ),
    ],
    ids=["token", "serve", "status"],
)
def test_whatever_is_done_after_a_token_has_expired_it_stays_so_when_the_clock_is_put_back(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, does
) -> None:
    token, made_s = print_token(registry), time.time()
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: made_s + 3700)
        does(registry)
    with pytest.raises(JoinRefused, match="the token has expired"):
        admit(registry, request(tmp_path, token, "pi-1"))


def test_a_cluster_does_not_share_a_file_with_the_tokens(registry: Registry) -> None:
    unit = MemberConfig(name="cu-tokens", address="127.0.0.1:50060")
    with registry.lock(), pytest.raises(ConfigError, match="cannot be called 'tokens'"):
        registry.create("tokens", unit, "")


def test_only_a_server_s_certificate_is_valid_for_its_host(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    """As a SuperNode does, a client compares the host that it dials."""
    token = print_token(registry)
    member = joined(joining, token, board(tmp_path, "pi-1"))
    with pytest.raises(LinkError, match="choose another name"):
        joined(joining, print_token(registry), board(tmp_path, "127.0.0.1", 1001))

    def verified(files: TlsFiles | None) -> None:
        assert files is not None and files.certificate is not None and files.key is not None
        theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        theirs.load_cert_chain(files.certificate, files.key)
        ours = ssl.create_default_context(cafile=str(registry.ca))
        to_them, to_us = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = theirs.wrap_bio(to_them, to_us, server_side=True)
        client = ours.wrap_bio(to_us, to_them, server_hostname="127.0.0.1")
        for _ in range(3):
            for end in (client, server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        assert client.version()

    verified(registry.cluster().tls_files("server"))
    with pytest.raises(ssl.SSLCertVerificationError):
        verified(member.cluster.tls_files("pi-1"))
    for name in ("cu-shed", "edge"):
        with pytest.raises(ssl.SSLCertVerificationError):
            verified(registry.cluster().tls_files(name))


def test_a_token_works_once_for_a_name_and_a_name_is_one_board_s(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    token = print_token(registry, members=3)
    joined(joining, token, board(tmp_path / "a", "pi-1"))
    with pytest.raises(LinkError, match="the token was used by pi-1 already"):
        joined(joining, token, board(tmp_path / "b", "pi-1", 1001))
    with pytest.raises(LinkError, match="pi-1 is a member of shed already, with another key"):
        joined(joining, print_token(registry), board(tmp_path / "c", "pi-1", 1001))
    with pytest.raises(LinkError, match=r"pi-1 of shed is at 127.0.0.1:1000 already"):
        joined(joining, print_token(registry), board(tmp_path / "d", "pi-2"))
    before = {path: path.read_bytes() for path in registry.certs.iterdir()}
    said = r"another member is called .* already|cannot be called|lets newcomers in"
    for name in ("PI-1", "edge", "server", "Cu-Shed", "ca", "CollaPipe-Joining"):
        joining._attempts = JoinAttempts()
        with pytest.raises(LinkError, match=said):
            joined(joining, print_token(registry), board(tmp_path / "e", name, 1002))
    assert {path: path.read_bytes() for path in registry.certs.iterdir()} == before
    assert names(registry.cluster()) == {"pi-1"}


def test_a_name_that_is_refused_leaves_the_token_for_another_one(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    joined(joining, print_token(registry), board(tmp_path, "raspberrypi"))
    token = print_token(registry)
    with pytest.raises(LinkError, match="choose another name with --name"):
        joined(joining, token, board(tmp_path / "other", "raspberrypi", 1001))
    assert joined(joining, token, board(tmp_path / "other", "pi-2", 1001)).name == "pi-2"


@pytest.mark.parametrize("role", [Role.DEVICE, Role.EDGE, Role.CONTROL_UNIT])
def test_who_has_joined_is_started_by_a_command_that_there_is(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    begun = list[list[str]]()
    monkeypatch.setattr(os, "execv", lambda _, command: begun.append(command))
    member = Membership(cluster=registry.cluster(), name="m", role=role)
    cli._start(member, registry.folder, ["--metrics", "9000"] if role is Role.DEVICE else [])
    (command,) = begun
    arguments = command[command.index("collapipe_flwr.cli") + 1 :]
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0


def test_an_edge_that_joined_one_of_two_clusters_joins_the_other_when_it_asks_again(
    tmp_path: Path,
) -> None:
    registry = new_registry(tmp_path / "cu", elsewhere=frozenset({Role.EDGE}))
    with registry.lock():
        registry.create("barn", MemberConfig(name="cu-barn", address="127.0.0.1:50060"), "")
        token = issue_token(registry, registry.cluster(ID), Role.EDGE, members=1, minutes=60.0)
    assert not registry.edge_folder.exists()  # that of another machine
    admit(registry, asked := request(tmp_path, token, "edge"))
    shed, barn = registry.cluster(ID), registry.cluster("barn")
    with registry.lock():
        registry._write(replace(barn, edge=replace(barn.edge, address="", fingerprint="")))
    admit(registry, asked)
    assert registry.cluster("barn").edge == shed.edge == registry.cluster(ID).edge
    assert registry.cluster(ID).version == shed.version  # not written again


def test_clusters_of_one_folder_share_edge_and_server_and_who_lets_newcomers_in(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    unit = MemberConfig(name="cu-barn", address="127.0.0.1:50060")
    with registry.lock():
        barn = registry.create("barn", unit, "127.0.0.1:2")
        token = issue_token(registry, barn, Role.DEVICE, members=1, minutes=60.0)
    shed = registry.cluster(ID)
    assert (barn.edge, barn.server) == (shed.edge, shed.server)
    assert joined(joining, token, board(tmp_path, "barn-1")).cluster.id == "barn"
    with registry.lock():
        other = issue_token(registry, shed, Role.DEVICE, members=2, minutes=60.0)
    with pytest.raises(LinkError, match="another member is called barn-1 already"):
        joined(joining, other, board(tmp_path / "other", "barn-1", 1001))
    joined(joining, other, board(tmp_path, "shed-1", 1001))
    access = access_control(registry.clusters().values())
    assert access.callers["edge"].clusters == {"shed", "barn"}
    assert access.callers["barn-1"].clusters == {"barn"}


def test_a_token_of_a_device_makes_no_edge_and_one_of_an_edge_makes_one(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    token = print_token(registry)
    found = joined(joining, replace(token, role=Role.EDGE), board(tmp_path, "pi-1"))
    assert found.role is Role.DEVICE
    with pytest.raises(LinkError, match="shed has an edge already: edge"):
        joined(joining, print_token(registry, role=Role.EDGE), board(tmp_path, "other", 1001))


def test_whoever_is_of_another_ca_is_told_nothing(tmp_path: Path, registry: Registry) -> None:
    stranger = new_registry(tmp_path / "stranger")
    token = print_token(registry)
    with JoiningService(stranger, "127.0.0.1:0") as between:
        heard: list[object] = []
        between._attempts.note = heard.append  # every call that is refused is noted
        newcomer = board(tmp_path, "pi-1")
        with pytest.raises(LinkError, match="is not of the CA that the token names, so nothing"):
            joined(between, token, newcomer)
        assert not heard and not stranger.cluster().devices
    assert not newcomer.folder.exists()


def test_a_member_of_the_same_ca_cannot_pass_as_the_control_unit(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    traitor = joined(joining, print_token(registry), board(tmp_path, "pi-1"))
    files = traitor.cluster.tls_files("pi-1")
    chain = tmp_path / "chain.pem"
    chain.write_text(files.certificate.read_text() + files.ca.read_text())
    heard: list[object] = []

    def listen(messages, _) -> bytes:
        heard.extend(messages)
        return b""

    tls = TlsFiles(certificate=chain, key=files.key)
    with Server("127.0.0.1:0", {JOIN: listen}, threads=1, most_calls=2, tls=tls) as between:
        token = print_token(registry)
        with pytest.raises(LinkError, match=r"control unit at .* cannot be reached"):
            join(token, board(tmp_path, "pi-2", 1001), measured, address=between.address)
    assert not heard


def test_a_stranger_s_long_message_is_refused_before_it_is_read(
    registry: Registry, joining: JoiningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(admission, "decode_message", never)
    pem = registry.ca.read_bytes()
    options = make_name_options(SERVICE_NAME)
    with (
        grpc.secure_channel(
            joining.address, grpc.ssl_channel_credentials(pem), options=options
        ) as channel,
        pytest.raises(grpc.RpcError) as refusal,
    ):
        JOIN.bind(channel)(bytes(MESSAGE_BYTES + 1), timeout=60)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_who_guesses_has_to_wait(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    now_s = [0.0]
    joining._attempts = JoinAttempts(clock=lambda: now_s[0])
    token = print_token(registry)
    for number in range(MOST_REFUSALS):
        guess = replace(token, secret=bytes([number]) * 16)
        with pytest.raises(LinkError, match="the token is not known"):
            joined(joining, guess, board(tmp_path, "pi-1"))
    with pytest.raises(LinkError, match="too many attempts were refused: try again in 60 s"):
        joined(joining, token, board(tmp_path, "pi-1"))
    now_s[0] = 61.0
    assert joined(joining, token, board(tmp_path, "pi-1")).name == "pi-1"


def test_nothing_secret_is_logged_shown_or_kept(
    tmp_path: Path, registry: Registry, joining: JoiningService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = print_token(registry)
    joined(joining, token, board(tmp_path, "pi-1"))
    with pytest.raises(LinkError):
        joined(joining, token, board(tmp_path, "pi-2", 1001))
    asked = request(tmp_path, token, "pi-3")
    shown = caplog.text + repr(token) + repr(asked) + registry.tokens._path.read_text()
    assert stat.S_IMODE(registry.tokens._path.stat().st_mode) == 0o600
    for secret in (token.secret.hex(), str(token).rpartition("/")[2], repr(token.secret)):
        assert secret not in shown
    with pytest.raises(ConfigError) as refusal:
        parse_token(str(token)[:-1])
    assert str(token).rpartition("/")[2][:-1] not in str(refusal.value)


def test_a_removed_board_stays_out_unless_it_is_let_in_as_a_new_one(
    tmp_path: Path, registry: Registry, joining: JoiningService
) -> None:
    token, newcomer = print_token(registry, members=2), board(tmp_path, "pi-1")
    before = joined(joining, token, newcomer)
    with registry.lock():
        after = registry.remove(registry.cluster(), "pi-1")
    assert after.version == before.cluster.version + 1 and not after.devices
    with pytest.raises(LinkError, match="the token was used by pi-1 already"):
        joined(joining, token, newcomer)
    with pytest.raises(LinkError, match="was removed from shed, and its key with it: join with"):
        joined(joining, print_token(registry), newcomer)
    forget(newcomer)
    again = joined(joining, print_token(registry), newcomer)
    (old,), (new,) = before.cluster.devices, again.cluster.devices
    assert old.fingerprint != new.fingerprint
    first = newcomer.own("key").read_bytes()
    with registry.lock():
        registry.remove(registry.cluster(), "pi-1")
    forget(newcomer)
    joined(joining, print_token(registry), newcomer)
    with registry.lock():
        registry.remove(registry.cluster(), "pi-1")
    newcomer.own("key").write_bytes(first)  # of the removal before the last one
    newcomer.own("pem").unlink()
    with pytest.raises(LinkError, match="was removed from shed, and its key with it"):
        joined(joining, print_token(registry), newcomer)


class Cut(BaseException):
    """The power fails."""


def cutting(monkeypatch: pytest.MonkeyPatch, at: int, thread: str) -> None:
    """The ``at``-th rename of threads whose name starts so never happens, nor what follows it."""
    from collapipe_flwr.core import durable

    publish, seen = durable.publish, [0]

    def cut(written: Path, path: Path) -> None:
        if threading.current_thread().name.startswith(thread):
            seen[0] += 1
            if seen[0] >= at:
                raise Cut if thread == "MainThread" else RuntimeError("cut")
        publish(written, path)

    monkeypatch.setattr(durable, "publish", cut)


@pytest.mark.parametrize("thread", ["MainThread", "rpc"])
@pytest.mark.parametrize("at", range(1, 7))
def test_a_join_that_breaks_off_anywhere_leaves_nothing_half_and_goes_on(
    tmp_path: Path,
    registry: Registry,
    joining: JoiningService,
    monkeypatch: pytest.MonkeyPatch,
    thread: str,
    at: int,
) -> None:
    token, newcomer = print_token(registry), board(tmp_path, "pi-1")
    with monkeypatch.context() as patch:
        cutting(patch, at, thread)
        try:
            joined(joining, token, newcomer)
        except (Cut, LinkError):
            cut_short = True
        else:
            cut_short = False
    assert cut_short == (at <= {"MainThread": 4, "rpc": 4}[thread])
    registry.cluster()  # can be read
    assert cut_short == (find_membership(newcomer, token.pin) is None)
    found = joined(joining, token, newcomer)
    shown = x509.load_pem_x509_certificate(newcomer.own("pem").read_bytes())
    key = load_or_make_key(newcomer.own("key"))
    assert shown.public_key() == key.public_key()
    assert find_membership(newcomer, token.pin) == found
    assert names(registry.cluster()) == {"pi-1"}


def request(folder: Path, token, name: str, unix_s: float | None = None) -> JoinRequest:
    folder.joinpath("keys").mkdir(exist_ok=True)
    key = load_or_make_key(folder / "keys" / f"{name}.key")
    return JoinRequest(
        secret=token.secret.hex(),
        name=name,
        request_pem=make_request(name, key),
        unix_s=time.time() if unix_s is None else unix_s,
        address="127.0.0.1:1000",
        version=read_own_version(),
    )


def _pin(registry: Registry) -> str:
    return print_token(registry).pin.hex()


def _own_paths(config) -> dict[str, object]:
    return {"folder": config.folder, "path": config.path, "measured": config.measured}


def test_making_a_cluster_says_first_that_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomer, "measure_machine", measured)
    words = [
        "cluster",
        "init",
        "shed",
        "--address",
        "127.0.0.1",
        "--folder",
        str(tmp_path / "unit"),
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "measuring this machine\n")
    assert "collapipe join shed@127.0.0.1:50060/" in done.stdout
    again = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (again.exit_code, again.stderr) == (0, "")  # what is known now may come from a check


def _init(folder: Path, *options: str) -> Result:
    words = ["cluster", "init", "shed", "--no-measure", "--folder", str(folder), *options]
    return CliRunner().invoke(app, words)


def test_without_a_route_the_address_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomer, "find_own_host", lambda: "127.0.0.1")
    refused = _init(tmp_path / "unit")
    assert isinstance(refused.exception, ConfigError) and "--address" in str(refused.exception)
    assert "collapipe join" not in refused.output
    assert _init(tmp_path / "unit", "--address", "127.0.0.1").exit_code == 0
    again = _init(tmp_path / "unit")  # only another token, with the address that is known
    assert again.exit_code == 0 and "collapipe join shed@127.0.0.1:50060/" in again.output


@pytest.mark.parametrize(
    ("option", "same", "other"),
    [
        ("--address", "192.0.2.1", "192.0.2.2"),
        ("--edge-address", "192.0.2.1:50061", "192.0.2.2:50061"),
    ],
)
def test_another_address_of_a_known_cluster_is_refused(
    tmp_path: Path, option: str, same: str, other: str
) -> None:
    folder = tmp_path / "unit"
    assert _init(folder, "--address", "192.0.2.1").exit_code == 0
    assert _init(folder, option, same).exit_code == 0
    refused = _init(folder, option, other)
    assert isinstance(refused.exception, ConfigError) and option in str(refused.exception)
    assert "collapipe join" not in refused.output
