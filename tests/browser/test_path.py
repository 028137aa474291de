"""From a dead event to its delivery by the pages of the admin, as a person clicks them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxOperation
from tests.browser import driving
from tests.fleet import Fleet
from tests.table import PLACED, insert, listening, row, statuses, write
from tests.waiting import wait_until

Visit = Callable[..., None]

EVENTS, EVENT = (f"django_outbox_outboxevent_{page}" for page in ("changelist", "change"))
PAUSES, PAUSE = (f"django_outbox_outboxpause_{page}" for page in ("changelist", "add"))
OPERATIONS = "django_outbox_outboxoperation_changelist"
DEAD = "?state=dead"
ONCE = {"policy": "fixed", "delay": 0, "max_attempts": 1}
START = 60.0  # seconds until a worker has started and delivered, on a machine that is busy
WORKER = {"RETRY": ONCE, "POLL_INTERVAL": 0.5, "WORKERS": 2}


@pytest.fixture
def worker(database_env: dict[str, str], tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Return a function that starts a real worker process."""
    fleet = Fleet(database_env, tmp_path, **WORKER)
    fleet.log.touch()
    yield lambda: fleet.start() and None
    fleet.kill_all()
    sys.stdout.write(fleet.log.read_text()[-6000:])  # pytest shows it where the test failed


# --- what a person does -----------------------------------------------------------------------


def press(driver: Any, label: str) -> None:
    """Click the button or link of this name, and wait for the page that it leads to."""
    control = named(driver, label)
    control.click()
    wait_until(lambda: is_gone(control), what=f"the page behind {label!r}")


def named(driver: Any, label: str) -> Any:
    """Return the button or link of this name."""
    name = f"[normalize-space()={label!r} or @value={label!r}]"
    return driver.find_element(
        By.XPATH, f"//*[@id='content']//*[self::a or self::button or self::input]{name}"
    )


def is_gone(element: Any) -> bool:
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

    try:
        element.is_enabled()
    except (NoSuchElementException, StaleElementReferenceException):
        return True
    return False


def listed(driver: Any) -> list[str]:
    return driving.texts(driver, "#result_list .outbox-id")


def shown(driver: Any) -> str:
    return "\n".join(driving.texts(driver, "#content"))


def messages(driver: Any) -> list[str]:
    return driving.texts(driver, ".messagelist li")


def asked(driver: Any) -> list[str]:
    return driving.texts(driver, "#content h2")


def is_settled(event_id: str, status: Status = Status.DONE) -> Callable[[], bool]:
    return lambda: row(event_id).status == status


def die(count: int = 1, **more: Any) -> list[str]:
    """Write events and deliver them in vain."""

    def reserve(event: outbox.Event) -> None:
        raise ValueError("out of stock")

    with listening(reserve, retry=outbox.Fixed(delay=0, max_attempts=1)):
        ids = write(count, **more)
        outbox.drain()
    assert statuses() == {"DEAD": count}
    return ids


# --- dead, looked at, replayed, delivered -----------------------------------------------------


def test_a_dead_event_is_found_read_replayed_and_delivered(
    driver: Any, visit: Visit, worker: Callable[[], None]
) -> None:
    """Issue 8: the whole path, with a real worker at its end."""
    (event_id,) = die()
    insert(2, due=None, status=Status.DONE)
    visit(EVENTS)
    assert len(listed(driver)) == 3
    driver.find_element(By.CSS_SELECTOR, "#changelist-filter a[href*='state=dead']").click()
    wait_until(lambda: listed(driver) == [event_id])

    driver.find_element(By.CSS_SELECTOR, "#result_list tbody th a").click()
    wait_until(lambda: asked(driver))
    page = shown(driver)
    for part in ("ValueError: out of stock", "Traceback", "in reserve", "It stays here"):
        assert part in page
    assert len(driving.texts(driver, ".outbox-timeline tr")) >= 3
    press(driver, "Replay")
    assert asked(driver) == ["Replay 1 delivery?"]
    assert statuses() == {"DEAD": 1, "DONE": 2}
    press(driver, "Yes: Replay")
    assert messages(driver) == ["1 delivery was replayed."]
    assert "It stays here" not in shown(driver)

    worker()
    wait_until(is_settled(event_id), within=START)
    driver.refresh()
    assert driving.texts(driver, ".outbox-status.outbox-done") == ["done"]
    history = driving.texts(driver, ".outbox-timeline th")
    assert "Traceback" not in shown(driver)  # the error is gone, its history is not
    assert any("died at attempt 1" in each and "out of stock" in each for each in history)
    assert any(each.startswith("replayed by") for each in history)


# --- several at once --------------------------------------------------------------------------


@pytest.mark.parametrize("scripts", [True, False], ids=["with-scripts", "without-scripts"])
def test_all_that_match_are_replayed_by_a_worker_while_nobody_looks(
    driver: Any, visit: Visit, worker: Callable[[], None], scripts: bool
) -> None:
    die(300)
    (other,) = insert(due=None, status=Status.DEAD, event_type="order.paid", last_error="no")
    driving.run_scripts(driver, allowed=scripts)
    visit(EVENTS, query=f"{DEAD}&event_type={PLACED}")
    press(driver, "Replay: all that match")
    assert asked(driver) == ["Replay 300 deliveries?"]
    driver.find_element(By.NAME, "rate").send_keys("100/s")
    assert driving.texts(driver, "output") == (["≈ 3 s"] if scripts else [""])
    press(driver, "Yes: Replay")
    assert len(driver.find_elements(By.TAG_NAME, "progress")) == 1
    driver.get("about:blank")
    worker()
    wait_until(lambda: statuses() == {"DONE": 300, "DEAD": 1}, within=START)
    assert row(other).status == Status.DEAD
    visit(OPERATIONS)
    assert driver.find_elements(By.TAG_NAME, "progress") == []
    assert "300 of 300" in shown(driver)


def test_an_operation_is_stopped_and_the_page_follows_it(driver: Any, visit: Visit) -> None:
    die(3)
    rows = OutboxEvent.objects.all()
    begun = OutboxOperation.objects.begin("replay", rows, by="ada", rate="1/h", matched=3)
    visit(OPERATIONS)
    press(driver, "Stop")
    assert len(messages(driver)) == 1
    assert driver.find_elements(By.TAG_NAME, "progress") == []
    begun.refresh_from_db()
    assert begun.state == "stopped"
