"""The example project: its own tests (G14) and its demonstration, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 100  # far more than a busy machine needs; without it a hang would hold the suite


def run(*arguments: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    environment = {**inherited, "DATABASE_URL": f"sqlite:///{scratch / 'example.sqlite3'}"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example's own test run says, one line per test."""
    scratch = tmp_path_factory.mktemp("example")
    done = run("example_project/manage.py", "test", "example_project", "-v2", scratch=scratch)
    return done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "test_success",
        "test_remote_failure_to_dead",
        "test_replay_after_the_repair",
        "test_rollback_without_a_call",
        "test_a_second_delivery_changes_nothing",
        "test_an_order_leads_to_its_place_in_the_list",
        "test_the_list_follows_the_events",
        "test_too_many_is_said_beside_the_product",
        "test_nothing_chosen_and_no_name",
        "test_a_form_from_elsewhere_is_refused",
    ],
)
def test_g14_example_shop(cases: str, name: str) -> None:
    assert re.search(rf"^{name} \(.*\) \.\.\. ok$", cases, re.MULTILINE), cases


def test_g14_no_case_is_left_out(cases: str) -> None:
    assert re.search(r"^Ran 10 tests in", cases, re.MULTILINE), cases
    assert re.search(r"^OK$", cases, re.MULTILINE), cases


# Row 56.
def test_demo(tmp_path: Path) -> None:
    done = run("-m", "example_project.demo", scratch=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    #             event      written delivered retries dead replayed
    assert re.search(r"^order\.placed +12 +12 +0 +0 +0 +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^payment\.requested +12 +12 +24 +0 +0 +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^parcel\.requested +12 +12 +3 +1 +1 +\d+ +\d+$", done.stdout, re.MULTILINE)
    assert "FAILED" not in done.stdout
    assert "http://127.0.0.1:8000/admin/" in done.stdout


def test_no_migration_is_missing(tmp_path: Path) -> None:
    done = run("example_project/manage.py", "makemigrations", "--check", scratch=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_secret_key_is_demanded_without_debug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEBUG", "0")
    monkeypatch.delenv("SECRET_KEY", raising=False)
    done = run("example_project/manage.py", "check", scratch=tmp_path)
    assert done.returncode == 1
    assert "needs a SECRET_KEY" in done.stderr
