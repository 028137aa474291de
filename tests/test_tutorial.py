"""The tutorials, followed step by step as a newcomer would: real commands, a real worker."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests import samples
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(
    r'^```(?P<kind>python|console|text)(?: title="(?P<file>[^"]+)")?(?: (?P<how>\w+))?\n'
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SETTING_UP = ("mkdir ", "python3 -m venv", "pip install")  # not run: this Python has it all
LOOK = "outbox_status"  # may run a moment too early, so it is repeated
pytestmark = [
    pytest.mark.timeout(400)  # seconds; a dozen commands, each of which starts Python
]


def test_511_the_first_event(tmp_path: Path) -> None:
    newcomer = Newcomer(tmp_path)
    newcomer.follow("tutorial/first-event.md#..A dead event, and its replay")
    assert newcomer.commands == 13  # no console block is skipped
    said = newcomer.log.read_text()
    assert "reserved cup" in said
    assert re.search(r"^listeners +order.placed$", said, re.MULTILINE)  # without any LOGGING
    assert "DEBUG done event_id=" in said


def test_511_the_dead_event(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "example_project",
        tmp_path / "example_project",
        ignore=shutil.ignore_patterns("*.sqlite3*"),
    )
    newcomer = Newcomer(tmp_path)
    newcomer.follow(
        "tutorial/first-event.md#A dead event, and its replay",
        {
            "2. An order that goes well": lambda: newcomer.browse(order("teapot")),
            "3. An order that does not": lambda: newcomer.browse(order("spirit-burner")),
            "4. Find out why": lambda: newcomer.browse(READ),
            "5. Repair the cause": lambda: newcomer.browse(REPAIR),
        },
    )
    assert newcomer.commands == 7


BROWSER = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
import django
django.setup()
from django.urls import reverse
from django_outbox.models import OutboxEvent
from example_project.demo.browser import Visitor
from example_project.partners.models import RefusedGoods
visitor = Visitor()
"""
READ = """
visitor.log_in("admin", "admin")
[event] = OutboxEvent.objects.dead()
url = reverse("admin:django_outbox_outboxevent_change", args=[event.pk])
page = visitor.client.get(url).content.decode()
assert "The courier does not carry spirit-burner" in page
assert "Replay" in page
"""
REPAIR = """
visitor.log_in("admin", "admin")
[line] = RefusedGoods.objects.all()
assert str(line) == "spirit-burner (flammable)"
visitor.fill_in(reverse("admin:partners_refusedgoods_delete", args=[line.pk]), {})
assert not RefusedGoods.objects.exists()
"""


def order(sku: str) -> str:
    return f"""
page = visitor.fill_in(reverse("shop"), {{"customer": "Ada", "{sku}": 1}})
assert page.status_code == 302, page.content
"""


class Newcomer:
    """Follows a tutorial page, block by block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "worker.log"
        self.commands = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        left_out = ("DJANGO", "DATABASE_URL")
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not any(each in name for each in left_out)
            },
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def follow(self, page: str, acts: Mapping[str, Callable[[], None]] | None = None) -> None:
        """Do every step; ``acts`` are the browser steps by section, done before its blocks."""
        waiting = dict(acts or {})
        try:
            for section in re.split(r"^##+ ", samples.section(page), flags=re.MULTILINE):
                waiting.pop(section.partition("\n")[0], lambda: None)()
                for step in STEP.finditer(section):
                    getattr(self, step["kind"])(step["text"], step["file"], step["how"])
            if "outbox_worker" in self._running:
                assert self._stop("outbox_worker", signal.SIGINT) == 0
        finally:
            for name in [*self._running]:
                self._stop(name, signal.SIGKILL)
        assert waiting == {}, "no such section"

    def python(self, code: str, file: str, how: str | None) -> None:
        path = self.directory / file
        old = f"{path.read_text()}\n\n" if file == "config/settings.py" else ""
        path.write_text(old + code)

    def console(self, text: str, file: str | None, how: str | None) -> None:
        for command, expected in turns(text):
            if command.startswith(SETTING_UP):
                continue
            self.commands += 1
            if how == "background":
                self._start(command.rpartition(" ")[2], command)
            elif LOOK in command:
                wait_until(lambda: fits(expected, self._run(command)), within=60, what=expected)  # noqa: B023
            else:
                found = self._run(command, 1 if how == "fails" else 0)
                assert fits(expected, found), f"{command}\n{found}"

    def text(self, lines: str, file: str | None, how: str | None) -> None:
        """Wait until the worker has logged these lines."""
        for line in lines.splitlines():
            pattern = re.escape(line).replace("…", r"\w+")
            wait_until(lambda: re.search(pattern, self.log.read_text()), within=60, what=line)  # noqa: B023

    def browse(self, script: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", BROWSER + script],
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr

    def _run(self, command: str, code: int = 0) -> str:
        command = command.replace("django-admin", "python -m django")
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, name: str, command: str) -> None:
        port = free_port()
        more = [f"127.0.0.1:{port}", "--noreload"] if name == "runserver" else []
        with (self.log if name == "outbox_worker" else Path(os.devnull)).open("ab") as stream:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-u", *command.split()[1:], *more],
                cwd=self.directory,
                env=self._environment,
                stdout=stream,
                stderr=stream,
            )
        if name == "outbox_worker":
            wait_until(lambda: "worker started" in self.log.read_text(), within=60)
        else:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/"), within=60)

    def _stop(self, name: str, how: signal.Signals) -> int:
        process = self._running.pop(name)
        process.send_signal(how)
        return process.wait(timeout=60)


def turns(text: str) -> Iterator[tuple[str, str]]:
    """Split a console block into commands, each with its expected output."""
    for turn in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = turn.partition("\n")
        yield command, expected


def fits(expected: str, found: str) -> bool:
    """Return whether the output ends as expected; … stands for lines that are not shown."""
    pattern = re.escape(expected).replace("…\\\n", "(?:.*\n)*")
    return bool(re.search(pattern + r"\Z", found))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as page:
            return bool(page.status == 200)
    except OSError:
        return False
