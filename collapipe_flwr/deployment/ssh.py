"""Steps as bash scripts, and running them on other machines by the system's `ssh`.

Each step tests whether it is done already, so that repeating all of them is safe. A failure of ssh
is one sentence with the way out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shlex import quote

from collapipe_flwr.core.errors import LinkError, LinkTimeout
from collapipe_flwr.deployment.inventory import Machine

_CONNECT_S = 10
_AS_ROOT = """sh -c 'if [ "$(id -u)" = 0 ]; then exec bash -s; else exec sudo -n bash -s; fi'"""
_LOST = 255  # ssh's own exit status
_LOCK_S = 60
_LEAST_MB = 32  # of a disk on which a step fails for another reason


class Outcome(StrEnum):
    KEPT = "kept"  # was done before
    DID = "did"
    WOULD = "would"  # in a dry run
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshStep:
    """``action`` is run if ``test`` fails; it ends at its first failing command, and its last
    output is then the reason.
    """

    name: str
    test: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a step on a machine."""

    machine: str
    step: str
    outcome: Outcome
    why: str = ""


# `tight` prints the disks that steps write to where they have so few MB free, and nothing else.
_PRELUDE = """
tight() {{
  df -P -m /opt /etc /var /tmp 2> /dev/null | awk -v least="$1" '
    NR > 1 && !seen[$6]++ {{
      all = all (all ? ", " : "") $6 " has " $4 " MB free of " $2
      if ($4 < least) full = 1
    }}
    END {{ if (full) print all }}'
}}
exec 9< /opt
flock -w {lock_s} 9 || {{
  printf 'failed\\tlock\\tanother deployment is at work there: wait until it has ended\\n'
  exit 0
}}
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
step() {{
  if ( "test_$1" ) > /dev/null 2>&1 < /dev/null 9>&-; then
    printf 'kept\\t%s\\t\\n' "$2"
  elif [ -n '{dry}' ]; then
    printf 'would\\t%s\\t\\n' "$2"
  else
    said=$( set -e; "do_$1" 2>&1 < /dev/null 9>&- )
    if [ $? -ne 0 ]; then
      case "$said" in
        *'No space left on device'* | *'Errno 28'*) full=$(tight 1000000000) ;;
        *) full=$(tight {least_mb}) ;;
      esac
      said=$(printf '%s' "$said" | grep -v '^ *$' | sed 's/^[^ ]*: line [0-9]*: //' | tail -n 3 |
        cut -c 1-300 | tr '\\t\\n' '  ')
      [ -z "$full" ] || said="its disk is full ($full): free some, then deploy again"
      printf 'failed\\t%s\\t%s\\n' "$2" "$said"
      exit 0
    fi
    printf 'did\\t%s\\t\\n' "$2"
  fi
}}
"""


def write_script(steps: Sequence[SshStep], *, dry: bool) -> str:
    """Assemble the bash script of these steps, whose output `read_results` reads."""
    parts = [_PRELUDE.format(lock_s=_LOCK_S, least_mb=_LEAST_MB, dry="dry" if dry else "")]
    for number, each in enumerate(steps):
        parts.append(f"test_{number}() {{\n{each.test}\n}}")
        parts.append(f"do_{number}() {{\n{each.action}\n}}")
    parts += [f"step {number} {quote(each.name)}" for number, each in enumerate(steps)]
    return "\n".join(parts)


def read_results(text: str, machine: str, steps: Sequence[SshStep]) -> list[Result]:
    """Read the results in a script's output; raises LinkError if it broke off without a failure."""
    lines = [line.split("\t", 2) for line in text.splitlines() if line.count("\t") >= 2]
    found = [
        Result(machine=machine, step=name, outcome=Outcome(word), why=why.strip())
        for word, name, why in lines
    ]
    failed = any(result.outcome is Outcome.FAILED for result in found)
    if not failed and len(found) < len(steps):
        missing = steps[len(found)].name
        raise LinkError(f"it stopped at {missing!r}: deploy again, which goes on from there")
    return found


def run(
    machine: Machine,
    script: str,
    *,
    deadline_s: float,
    config: Path | None = None,
    accept_new: bool = False,
) -> str:
    """Run a bash script there as root once all of it has arrived; returns its output.

    With ``accept_new``, ssh accepts the key of a new host. Raises LinkError.
    """
    whole = f"main() {{\n{script}\n}}\nmain\n"
    try:
        done = subprocess.run(
            [*_build_command(machine, config, accept_new=accept_new), _AS_ROOT],
            input=whole.encode(),
            capture_output=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LinkTimeout(
            f"{machine.login} did not finish within {deadline_s:g} s: deploy again, which goes "
            "on from there, or give it longer with --deadline-s"
        ) from error
    except OSError as error:
        raise LinkError(f"`ssh` cannot be run here: {error.strerror}") from error
    if done.returncode:
        raise LinkError(_explain(machine, done.returncode, done.stderr.decode(errors="replace")))
    return done.stdout.decode(errors="replace")


def _build_command(machine: Machine, config: Path | None, *, accept_new: bool) -> list[str]:
    options = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_S}"]
    options += ["ServerAliveInterval=10", "ServerAliveCountMax=3"]
    options += ["StrictHostKeyChecking=accept-new"] if accept_new else []
    words = [word for option in options for word in ("-o", option)]
    access = machine.access
    words += ["-F", str(config)] if config else []
    words += ["-p", str(access.port)] if access.port else []
    words += ["-l", access.user] if access.user else []
    return ["ssh", *words, "--", machine.host]


def _explain(machine: Machine, code: int, said: str) -> str:
    """Explain, from the output of ssh or sudo, what failed and the way out."""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    where, host = machine.login, machine.host
    if "IDENTIFICATION HAS CHANGED" in said:
        return (
            f"another machine than before answers as {host}, or it was installed anew: if you "
            f"know why, forget its old key (`ssh-keygen -R {host}`) and deploy again"
        )
    if "Host key verification failed" in said:
        return (
            f"ssh does not know the host key of {host}: connect once by hand (`ssh {where}`) "
            "and compare it, or repeat with --accept-new"
        )
    if "Permission denied" in said:
        return f"{where} refuses this user: copy your key there (`ssh-copy-id {where}`)"
    if "a password is required" in said or "terminal is required" in said:
        return (
            f'sudo asks for a password on {host}: let it run without (`echo "$USER ALL=(ALL) '
            'NOPASSWD: ALL" | sudo tee /etc/sudoers.d/collapipe` there), or deploy as root'
        )
    if "No space left on device" in said:
        return f"a disk of {host} is full ({last}): free some there, then deploy again"
    if code == _LOST:
        return f"{where} cannot be reached ({last}): see that it is on and that ssh runs there"
    return f"{where}: {last or f'ended with {code}'}"
