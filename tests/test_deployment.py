"""The files of the page about production: their commands are accepted, their stops long enough."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import load_command_class

from django_outbox import conf
from tests import samples
from tests.cases import cases
from tests.test_tutorial import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent


def file(title: str) -> str:
    [text] = re.findall(
        rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$',
        samples.section("how-to/go-to-production.md"),
        re.MULTILINE | re.DOTALL,
    )
    return str(text)


def image(instruction: str) -> list[str]:
    [found] = re.findall(rf"^{instruction} (\[.*\])$", file("Dockerfile"), re.MULTILINE)
    return list(json.loads(found))


def unit(name: str) -> ConfigParser:
    parsed = ConfigParser(interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(file(name))
    return parsed


SERVICES: dict[str, Any] = yaml.safe_load(file("compose.yaml"))["services"]
POD: dict[str, Any] = yaml.safe_load(file("worker.yaml"))["spec"]["template"]["spec"]
SERVICE = "/etc/systemd/system/outbox.service"
SYSTEMD = shlex.split(unit(SERVICE)["Service"]["ExecStart"])


@cases("command", [image("CMD"), POD["containers"][0]["args"], SYSTEMD])
def test_the_worker_takes_the_options(command: list[str]) -> None:
    at = command.index("outbox_worker")
    parser = load_command_class("django_outbox", "outbox_worker").create_parser("manage.py", "x")
    parser.parse_args(command[at + 1 :])
    assert Path(command[at - 2]).name == "python"


def test_an_orphan_has_an_init_and_a_stop_has_its_time() -> None:
    assert image("ENTRYPOINT") == ["tini", "--"]
    assert "command" not in POD["containers"][0]  # which would replace it
    drain, longer = conf.Settings().DRAIN_TIMEOUT, 30
    assert int(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) > drain
    assert POD["terminationGracePeriodSeconds"] > longer
    assert int(unit(SERVICE)["Service"]["TimeoutStopSec"]) > longer


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if not (verify := shutil.which("systemd-analyze")):
        pytest.skip("systemd-analyze is not installed")
    text = file(SERVICE).replace(SYSTEMD[0], sys.executable).replace("User=shop\n", "")
    (tmp_path / "outbox.service").write_text(text)
    done = subprocess.run(
        [verify, "--user", "verify", tmp_path / "outbox.service"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "outbox.service" in done.stderr) == (0, False), done.stderr


def test_the_worker_of_the_image_is_healthy_and_drains(tmp_path: Path) -> None:
    port = str(free_port())
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{tmp_path / 'shop.sqlite3'}"}
    environment.pop("DJANGO_SETTINGS_MODULE", None)

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, *(each.replace("8001", port) for each in command[1:])]
        return subprocess.Popen(command, cwd=ROOT / "example_project", env=environment)

    assert start(SERVICES["migrate"]["command"]).wait(60) == 0
    check = SERVICES["worker"]["healthcheck"]["test"][1:]
    worker = start(image("CMD"))
    try:
        wait_until(lambda: start(check).wait(20) == 0, within=60)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
