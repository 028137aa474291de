"""Run the shop with a real worker in a scratch database, and check the outcome.

The exit code is 0 if everything expected has happened, else 1. With ``--two-databases`` the shop
has a database of its own, and the outbox is in it.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from example_project.demo.worker_process import MANAGE

BROWSE = """
To browse the same shop, with a database of its own (example_project/shop.sqlite3):

  {manage} migrate && {manage} seed
  {manage} outbox_worker        (in a second terminal)
  {manage} runserver

  the shop    http://127.0.0.1:8000/
  the admin   http://127.0.0.1:8000/admin/   (login admin, password admin)
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="outbox-demo-") as scratch:
        set_up(Path(scratch))
        from example_project.demo.walk import walk  # its models can be imported from here on

        kept = walk(Path(scratch))
    print(BROWSE.format(manage=f"{shown(sys.executable)} {shown(MANAGE)}"))
    return 0 if kept else 1


def set_up(scratch: Path) -> None:
    """Point the example at a new SQLite file, for this process and for the worker's."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    os.environ["DATABASE_URL"] = f"sqlite:///{scratch / 'demo.sqlite3'}"
    if "--two-databases" in sys.argv:
        os.environ["SHOP_DATABASE_URL"] = f"sqlite:///{scratch / 'shop.sqlite3'}"
    os.environ["DEBUG"] = "1"  # the seeded login is for local use, and refused otherwise

    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    logging.getLogger("django.request").setLevel("ERROR")  # one order is meant to be refused
    for alias in connections:
        call_command("migrate", database=alias, verbosity=0)
    call_command("seed")


def shown(path: str | Path) -> str:
    """Shorten a path for the reader who stands in the current directory."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


if __name__ == "__main__":
    sys.exit(main())
