"""Run pytest on MariaDB where that can be done; where it cannot, say so in one line.

Not every machine has a MariaDB server and the headers that mysqlclient is built with, so locally
their absence is no failure. With ``CI=true`` it is one: there the three databases are promised.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from tests import databases

# The driver as the package itself asks for it, of the copy that is installed already.
DRIVER = "django-transactional-outbox[mysql]"


def main(arguments: list[str]) -> int:
    if lack := missing():
        print(f"MariaDB was NOT RUN: {lack}.", flush=True)
        return 1 if os.environ.get("CI") == "true" else 0
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.call(command, env={**os.environ, "OUTBOX_TEST_DB": "mariadb"})


def missing() -> str | None:
    """Return what keeps MariaDB from being tested here, or None."""
    if os.environ.get("DATABASE_URL", "").startswith("mysql:"):
        return None if driver_installed() else no_driver()
    private = databases.mariadb_server() is not None
    if not private and not databases.mariadb_answers():
        return "no server answers at 127.0.0.1:3306 and there is no mariadbd to start"
    if not driver_installed():
        return no_driver()
    host, port = databases.LOCAL_MARIADB
    if not private and not databases.mariadb_lets_us_in(host=host, port=port):
        return (
            "the server at 127.0.0.1:3306 refuses root without a password and there is no mariadbd"
        )
    return None


def no_driver() -> str:
    packages = "gcc pkg-config python3-dev libmariadb-dev"
    return f"mysqlclient does not build here (on Debian: apt install {packages})"


def driver_installed() -> bool:
    """Install mysqlclient, which is compiled here, and say whether that worked."""
    if importlib.util.find_spec("MySQLdb"):
        return True
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", DRIVER]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode and os.environ.get("CI") == "true":
        print(done.stdout, done.stderr, sep="\n", flush=True)
    importlib.invalidate_caches()
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
