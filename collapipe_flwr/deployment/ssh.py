"""Scripts on other machines, by the system's own `ssh`: what they say, or one clear sentence."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from collapipe_flwr.core.errors import LinkError, LinkTimeout
from collapipe_flwr.deployment.inventory import Machine

_CONNECT_S = 10
_AS_ROOT = """sh -c 'if [ "$(id -u)" = 0 ]; then exec bash -s; else exec sudo -n bash -s; fi'"""
_LOST = 255  # ssh's own exit status


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """How to reach a machine; ``accept_new`` believes the key of a host that was never seen."""

    machine: Machine
    config: Path | None = None
    accept_new: bool = False

    def run(self, script: str, *, deadline_s: float) -> str:
        """The output of a bash script, run there as root.

        The script does not begin before all of it is there. Raises LinkError.
        """
        whole = f"main() {{\n{script}\n}}\nmain\n"
        try:
            done = subprocess.run(
                [*self._words(), _AS_ROOT],
                input=whole.encode(),
                capture_output=True,
                timeout=deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LinkTimeout(
                f"{self._where} did not finish within {deadline_s:g} s: deploy again, which goes "
                "on from there, or give it longer with --deadline-s"
            ) from error
        except OSError as error:
            raise LinkError(f"`ssh` cannot be run here: {error.strerror}") from error
        if done.returncode:
            raise LinkError(self._why(done.returncode, done.stderr.decode(errors="replace")))
        return done.stdout.decode(errors="replace")

    @property
    def _where(self) -> str:
        user = self.machine.access.user
        return f"{user}@{self.machine.host}" if user else self.machine.host

    def _words(self) -> list[str]:
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(_CONNECT_S),
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
        }
        if self.accept_new:
            options["StrictHostKeyChecking"] = "accept-new"
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        access = self.machine.access
        words += ["-F", str(self.config)] if self.config else []
        words += ["-p", str(access.port)] if access.port else []
        words += ["-l", access.user] if access.user else []
        return ["ssh", *words, "--", self.machine.host]

    def _why(self, code: int, said: str) -> str:
        """One sentence with the way out, from what ssh or sudo said."""
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        where, host = self._where, self.machine.host
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
            return (
                f"{where} does not let this user in: bring your key there (`ssh-copy-id {where}`)"
            )
        if "a password is required" in said or "terminal is required" in said:
            return (
                f'sudo asks for a password on {host}: allow it without (`echo "$USER ALL=(ALL) '
                'NOPASSWD: ALL" | sudo tee /etc/sudoers.d/collapipe` there), or deploy as root'
            )
        if code == _LOST:
            return f"{where} cannot be reached ({last}): see that it is on and that ssh runs there"
        return f"{where}: {last or f'ended with {code}'}"
