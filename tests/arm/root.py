"""An arm64 Debian with what a Raspberry Pi installs, and its Python under qemu.

It is made once, in ``$COLLAPIPE_ARM_ROOT`` or ``~/.cache/collapipe/arm64``; packages are installed
anew when the constraints or the dependencies of the project change. Nothing is registered with the
kernel, and mounts are private to each process, so there is nothing to undo when one ends.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "deploy" / "constraints" / "arm64-cpu.txt"
QEMU, PYTHON, SUITE = "qemu-aarch64-static", "python3.11", "bookworm"
PACKAGES, SOURCES = "opt/packages", "opt/collapipe"  # in the root
NEEDED = ("debootstrap", QEMU, "unshare", "uv")
# $0 is the root, $1 the packages, $2 the sources; the rest is Python's.
ENTER = f"""
set -e
cd "$0"
mount --bind "$1" {PACKAGES}
mount --bind -o ro "$2" {SOURCES}/collapipe_flwr
mount --bind /tmp tmp
mount --rbind /dev dev
mount --rbind /sys sys
mount -t proc proc proc
shift 2
exec chroot . /usr/bin/{QEMU} /usr/bin/{PYTHON} "$@"
"""


def missing() -> str:
    """Why there can be no root here, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "root on Linux is needed, for debootstrap and chroot"
    absent = ", ".join(name for name in NEEDED if shutil.which(name) is None)
    return absent and f"not found: {absent}; apt-get install qemu-user-static debootstrap"


class ArmRoot:
    """The root in ``folder``, made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.system, self.packages = folder / "system", folder / "packages"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not self.system.exists():
                _make_system(self.system)
            if not _is_of(self.packages, stamp := _stamp()):
                _install(self.packages, stamp)

    @classmethod
    def cached(cls) -> ArmRoot:
        """That of this user."""
        known = os.environ.get("COLLAPIPE_ARM_ROOT")
        return cls(Path(known) if known else Path.home() / ".cache" / "collapipe" / "arm64")

    @property
    def environment(self) -> dict[str, str]:
        """Of processes there: nothing of this machine's."""
        return {
            "PATH": "/usr/sbin:/usr/bin",
            "HOME": "/nonexistent",
            "PYTHONPATH": f"/{PACKAGES}:/{SOURCES}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *words: str) -> list[str]:
        """``python3.11 WORDS`` there, which sees this machine's /tmp; its pid is the command's."""
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER]
        places = (self.system, self.packages, ROOT / "collapipe_flwr")
        return [*enter, *map(str, places), *words]


def _make_system(folder: Path) -> None:
    """Unpack Debian's packages; nothing needs their scripts to run."""
    draft = folder.with_name("system.part")
    shutil.rmtree(draft, ignore_errors=True)
    options = ["--foreign", "--arch=arm64", "--variant=minbase", f"--include={PYTHON}"]
    _run("debootstrap", *options, SUITE, str(draft))
    archives = draft / "var/cache/apt/archives"
    for package in sorted(archives.glob("*.deb")):
        _run("dpkg-deb", "--extract", str(package), str(draft))
    shutil.rmtree(archives)
    for place in (PACKAGES, f"{SOURCES}/collapipe_flwr"):
        (draft / place).mkdir(parents=True)
    shutil.copy(str(shutil.which(QEMU)), draft / "usr/bin")
    draft.rename(folder)


def _install(folder: Path, stamp: str) -> None:
    """The packages that `pip install ./src` brings to a Raspberry Pi, without the project."""
    draft = folder.with_name("packages.part")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    board = ["--python-platform", "aarch64-manylinux_2_28", "--python-version", "3.11"]
    binary = ["--only-binary", ":all:", "--compile-bytecode", "--target", str(draft)]
    # The system's certificates, as pip takes them; uv alone would take its own.
    _run(
        "uv", "pip", "install", "--system-certs", *board, *binary, "-c", str(CONSTRAINTS), *_base()
    )
    (draft / "stamp").write_text(stamp)
    draft.rename(folder)


def _base() -> list[str]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [text for text in table["dependencies"] if "extra ==" not in text]


def _stamp() -> str:
    texts = (CONSTRAINTS.read_text(), (ROOT / "constraints.txt").read_text(), *_base())
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _is_of(folder: Path, stamp: str) -> bool:
    known = folder / "stamp"
    return known.exists() and known.read_text() == stamp


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


if __name__ == "__main__":
    if why := missing():
        sys.exit(f"make test-arm: {why}")
    print(f"arm64 root: {ArmRoot.cached().system}")
