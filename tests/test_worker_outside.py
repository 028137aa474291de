"""What ``outbox_worker`` exposes besides its health: metrics on a port, and JSON log lines."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.fleet import wait_until
from tests.reach.children import Child, Site, nothing_is_left, workers_show
from tests.table import statuses, write

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def metrics_env(tmp_path: Path) -> dict[str, str]:
    """Return settings with the metrics app, and without a directory for metrics."""
    path = tmp_path / "site_with_metrics.py"
    path.write_text(
        "from tests.reach.settings import *\n"
        "INSTALLED_APPS = [*INSTALLED_APPS, 'django_outbox.contrib.prometheus']\n"
    )
    return {"DJANGO_SETTINGS_MODULE": path.stem, "PYTHONPATH": str(tmp_path)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "metrics"
    directory.mkdir()
    return directory


def worker(site: Site, *options: str, env: dict[str, str] | None = None, **outbox: Any) -> Any:
    return site.run("django", "outbox_worker", *options, env=env, **outbox)


def scrape(port: int) -> str:
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except URLError:
        return ""


def port_of(child: Child) -> int:
    found = re.search(r"\d+$", child.says(r"metrics port open port=\d+"))
    assert found
    return int(found[0])


def settled(text: str) -> float:
    """Return the number of deliveries of our type in a scrape."""
    counts = re.findall(
        r'^outbox_events_settled_total\{.*event_type="reach.noted".*\} (\S+)$', text, re.MULTILINE
    )
    return sum(map(float, counts))


def test_432_one_port_sums_up_several_processes(
    site: Site, metrics_env: dict[str, str], directory: Path
) -> None:
    """The supervisor forks, so it has no threads and no database connection."""
    env = {**metrics_env, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    two = ("--processes", "2", "--metrics-port", "0")
    with worker(site, *two, env=env, WORKERS=1, COLD_QUEUE_CAPACITY=2, POLL_BATCH_SIZE=2) as child:
        port = port_of(child)
        workers = workers_show(2)
        write(40, "reach.noted")
        wait_until(lambda: settled(scrape(port)) == 40, what="forty deliveries")
        (shows,) = {each.pid for each in child.children} - workers
        os.kill(shows, signal.SIGKILL)  # the process that serves the metrics is restarted, too
        child.says("ended pid=")
        wait_until(lambda: len(child.children) == 3, what="three processes again")
        assert child.stop() == 0
    assert statuses() == {"DONE": 40}
    nothing_is_left()


def refused(site: Site, *options: str, env: dict[str, str] | None) -> str:
    with worker(site, *options, env=env) as child:
        assert child.wait() == 1
        assert "Traceback" not in child.output
        return child.output


def test_metrics_without_the_app_are_refused(site: Site) -> None:
    said = refused(site, "--metrics-port", "0", env=None)
    assert "'django_outbox.contrib.prometheus' is not in INSTALLED_APPS" in said


@pytest.mark.parametrize("value", ["", "/no/such/directory"], ids=["unset", "missing"])
def test_metrics_of_several_processes_need_a_directory(
    site: Site, metrics_env: dict[str, str], value: str
) -> None:
    env = {**metrics_env, "PROMETHEUS_MULTIPROC_DIR": value}
    said = refused(site, "--metrics-port", "0", "--processes", "2", env=env)
    assert "PROMETHEUS_MULTIPROC_DIR" in said


# -- log lines -------------------------------------------------------------------------------------


def test_log_lines_are_json_and_keep_the_payload_to_themselves(site: Site) -> None:
    with worker(site, "--format", "json", UNROUTABLE_GRACE=0) as child:
        child.says("worker started")  # its threads may log before this line
        (event_id,) = write(1, "nobody.listens", payload={"card": "4111"})
        wait_until(lambda: statuses() == {"DEAD": 1}, what="its death")
        assert child.stop() == 0
        lines = [json.loads(each) for each in child.output.splitlines()]
    events = [each["event"] for each in lines]
    assert events[0] == "worker started"
    assert events[-1] == "worker stopped"
    (dead,) = [each for each in lines if each["event"] == "dead"]
    assert (dead["event_id"], dead["event_type"]) == (event_id, "nobody.listens")
    assert (dead["level"], dead["attempt"]) == ("ERROR", 0)
    assert "4111" not in child.output
