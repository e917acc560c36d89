"""Steps are safe to repeat, end at their first failure, and ssh's failures become sentences."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import LinkError, LinkTimeout
from collapipe_flwr.deployment import roles
from collapipe_flwr.deployment.inventory import Access, Machine, MachineRole
from collapipe_flwr.deployment.ssh import SshStep, read_results, run, write_script

MACHINE = Machine(
    host="10.0.0.11",
    access=Access(user="pi", port=2222),
    roles=(MachineRole(kind="device", name="pi-1", address="10.0.0.11"),),
)


def carried_out(steps: list[SshStep], *, dry: bool = False) -> list[tuple[str, str, str]]:
    script = f"main() {{\n{write_script(steps, dry=dry)}\n}}\nmain\n"
    done = subprocess.run(
        ["bash", "-s"], input=script, capture_output=True, text=True, timeout=60, check=True
    )
    found = read_results(done.stdout, "pi-1", steps)
    return [(result.outcome.value, result.step, result.why) for result in found]


def test_a_step_is_done_once_and_not_at_all_in_a_dry_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    steps = [SshStep(name="pi's file", test=f"[ -e {file} ]", action=f"touch {file}")]
    assert carried_out(steps, dry=True) == [("would", "pi's file", "")]
    assert not file.exists()
    assert carried_out(steps) == [("did", "pi's file", "")]
    assert carried_out(steps) == carried_out(steps, dry=True) == [("kept", "pi's file", "")]


def test_an_action_ends_at_its_first_failure_and_so_do_the_steps(tmp_path: Path) -> None:
    action = f"echo first\necho 'no\troom' >&2\nfalse\ntouch {tmp_path}/never"
    steps = [
        SshStep(name="one", test="false", action=action),
        SshStep(name="two", test="false", action=f"touch {tmp_path}/never"),
    ]
    assert carried_out(steps) == [("failed", "one", "first no room")]
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("output", "free_mb", "full"),
    [
        ("OSError: [Errno 28] No space left on device", 900, True),  # pip has cleaned up since
        ("Error: Command 'ensurepip' returned 1", 0, True),
        ("no such wheel", 900, False),
    ],
)
def test_a_full_disk_is_named_with_what_is_free(
    output: str, free_mb: int, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = tmp_path / "df"
    df.write_text(
        "#!/bin/sh\necho Filesystem 1048576-blocks Used Available Capacity Mounted on\n"
        f"for folder in 1 2; do echo /dev/card 9000 100 {free_mb} 99% /opt; done\n"
    )
    df.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    steps = [SshStep(name="one", test="false", action=f'/no/pip || echo "{output}"; exit 1')]
    ((outcome, _, why),) = carried_out(steps)
    assert outcome == "failed" and "line" not in why
    assert ("/opt has" in why) == full and why.count(f"{free_mb} MB free of 9000") == int(full)
    assert (output in why) != full


def test_a_service_starts_again_only_with_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("systemctl", "sleep"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(roles, "OPT", str(tmp_path))
    steps = [roles._restart_service(roles.UnitSettings(unit="none", settings={}))]
    venv, installed = tmp_path / "venv", tmp_path / "installed"

    def deployed_twice() -> list[str]:
        return [outcome for _ in range(2) for outcome, _, _ in carried_out(steps)]

    venv.mkdir()
    for wheel in ("a", "b"):
        installed.write_text(wheel)
        assert deployed_twice() == ["did", "kept"]
    installed.unlink()
    venv.rmdir()
    for environment in ("a", "b"):
        venv.unlink(missing_ok=True)
        venv.symlink_to(tmp_path / environment)
        assert deployed_twice() == ["did", "kept"]


def test_an_action_cannot_swallow_the_script() -> None:
    steps = [SshStep(name=n, test="cat; false", action="cat") for n in ("one", "two")]
    assert [outcome for outcome, _, _ in carried_out(steps)] == ["did", "did"]


def test_a_script_that_broke_off_is_no_success() -> None:
    steps = [SshStep(name=n, test="false", action="true") for n in ("one", "two")]
    with pytest.raises(LinkError, match="stopped at 'two': deploy again"):
        read_results("did\tone\t\n", "pi-1", steps)


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "ssh"


def says(ssh: Path, text: str, code: int) -> None:
    ssh.write_text(f"#!/bin/sh\ncat > /dev/null\ncat >&2 <<'END'\n{text}\nEND\nexit {code}\n")
    ssh.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nx", 255, "ssh-keygen -R 10.0.0.11"),
        ("Host key verification failed.", 255, "connect once by hand .*--accept-new"),
        ("pi@10.0.0.11: Permission denied (publickey).", 255, "ssh-copy-id pi@10.0.0.11"),
        ("ssh: connect to host: Connection refused", 255, "cannot be reached .*refused"),
        ("sudo: a password is required", 1, "sudo asks for a password on 10.0.0.11: .*NOPASSWD"),
        ("mktemp: failed: No space left on device", 1, "a disk of 10.0.0.11 is full .*mktemp"),
        ("bash: no such thing", 127, "pi@10.0.0.11: bash: no such thing"),
        ("", 3, "ended with 3"),
    ],
)
def test_a_failure_of_ssh_is_one_sentence_with_the_way_out(
    text: str, code: int, sentence: str, fake_ssh: Path
) -> None:
    says(fake_ssh, text, code)
    with pytest.raises(LinkError, match=sentence) as told:
        run(MACHINE, "true", deadline_s=30)
    assert "\n" not in str(told.value)


def test_ssh_gets_its_settings_and_the_whole_script(fake_ssh: Path, tmp_path: Path) -> None:
    fake_ssh.write_text('#!/bin/sh\necho "$@"\ncat\n')
    fake_ssh.chmod(0o755)
    config = tmp_path / "config"
    said = run(MACHINE, "echo hello", deadline_s=30, config=config, accept_new=True)
    for words in (f"-F {tmp_path}/config", "-p 2222 -l pi -- 10.0.0.11", "BatchMode=yes"):
        assert words in said
    assert "StrictHostKeyChecking=accept-new" in said
    assert said.endswith("main() {\necho hello\n}\nmain\n")


def test_a_machine_that_hangs_has_a_deadline(fake_ssh: Path) -> None:
    fake_ssh.write_text("#!/bin/sh\nexec sleep 60\n")
    fake_ssh.chmod(0o755)
    with pytest.raises(LinkTimeout, match=r"did not finish within 0.5 s: deploy again"):
        run(MACHINE, "true", deadline_s=0.5)
