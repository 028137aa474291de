"""The example project: its own tests and its demonstration, each in a separate process."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 100  # far more than a busy machine needs; ends a hang


def run(*arguments: str, scratch: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    url = f"sqlite:///{scratch / 'example.sqlite3'}"
    environment = {**inherited, "DATABASE_URL": url, **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def second(scratch: Path) -> dict[str, str]:
    return {"SHOP_DATABASE_URL": f"sqlite:///{scratch / 'shop.sqlite3'}"}


@pytest.mark.parametrize("databases", [1, 2])
def test_g14_example_shop(tmp_path: Path, databases: int) -> None:
    """Its own ten tests pass, none is left out or skipped."""
    more = second(tmp_path) if databases == 2 else {}
    said = run("example_project/manage.py", "test", "example_project", scratch=tmp_path, **more)
    assert re.search(r"^Ran 10 tests in .*\n\nOK$", said.stderr, re.MULTILINE), said.stderr


@pytest.mark.parametrize(
    "options", [[], ["--two-databases"]], ids=["one_database", "two_databases"]
)
def test_demo(tmp_path: Path, options: list[str]) -> None:
    done = run("-m", "example_project.demo", *options, scratch=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    #             event      written delivered retries dead replayed
    assert re.search(r"^order\.placed +12 +12 +0 +0 +0 +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^payment\.requested +12 +12 +24 +0 +0 +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^parcel\.requested +12 +12 +3 +1 +1 +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert "FAILED" not in done.stdout
    assert "http://127.0.0.1:8000/admin/" in done.stdout


@pytest.mark.timeout(400)  # four commands, each a new Python process
def test_load_with_a_worker_beside_it(tmp_path: Path) -> None:
    """All events of the orders are delivered and none is dead."""
    for arguments in (["migrate", "-v0"], ["seed"]):
        assert run("example_project/manage.py", *arguments, scratch=tmp_path).returncode == 0
    url = f"sqlite:///{tmp_path / 'example.sqlite3'}"
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    worker = subprocess.Popen(
        [sys.executable, "example_project/manage.py", "outbox_worker"],
        cwd=ROOT,
        env={**environment, "DATABASE_URL": url},
        stderr=subprocess.DEVNULL,
    )
    try:
        arguments = ("load", "--orders", "12", "--writers", "2", "--wait", "90")
        done = run("example_project/manage.py", *arguments, scratch=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "12 orders placed, 36 events written" in done.stdout
        assert "delivered 36, dead 0" in done.stdout
    finally:
        worker.terminate()
        assert worker.wait(30) == 0


def test_498_the_outbox_is_migrated_to_where_the_shop_is(tmp_path: Path) -> None:
    for alias in ("default", "shop"):
        migrate = ("example_project/manage.py", "migrate", "--database", alias, "-v0")
        done = run(*migrate, scratch=tmp_path, **second(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
    tables = {name: tables_of(tmp_path / f"{name}.sqlite3") for name in ("example", "shop")}
    assert {"outbox_event", "shop_order"} <= tables["shop"]
    assert {"auth_user", "warehouse_parcel"} <= tables["example"]
    assert not tables["shop"] & tables["example"] - {"django_migrations", "sqlite_sequence"}
    arguments = ("example_project/manage.py", "makemigrations", "--check")
    checked = run(*arguments, scratch=tmp_path, **second(tmp_path))  # the system checks run, too
    assert (checked.returncode, checked.stdout) == (0, "No changes detected\n"), checked.stderr
    assert "django_outbox" not in checked.stderr


def tables_of(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows}


def test_secret_key_is_demanded_without_debug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEBUG", "0")
    monkeypatch.delenv("SECRET_KEY", raising=False)
    done = run("example_project/manage.py", "check", scratch=tmp_path)
    assert done.returncode == 1
    assert "needs a SECRET_KEY" in done.stderr
