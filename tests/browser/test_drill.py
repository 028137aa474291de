"""The drill of an incident: what a person does at three in the morning, from the dashboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxAttempt, OutboxEvent, OutboxPause
from tests.browser import driving, scene
from tests.browser.test_dashboard import DASHBOARD
from tests.browser.test_path import press
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Visit = Callable[..., None]
CAUSE = "#outbox-dead tbody th a"


def verdict(driver: Any) -> str:
    return "\n".join(driving.texts(driver, ".outbox-verdict"))


def click(driver: Any, selector: str) -> None:
    """Click what matches first, and wait for the page behind it."""
    before = driver.current_url
    driver.find_element(By.CSS_SELECTOR, selector).click()
    wait_until(lambda: driver.current_url != before, what=f"the page behind {selector}")


@pytest.mark.timeout(300)
def test_the_drill(driver: Any, visit: Visit) -> None:
    """The cause is one click away, its pause two, its replay three; each headline is true."""
    with scene.listeners():
        poison = scene.the_drill()
        visit(DASHBOARD)
        said = verdict(driver)
        for each in (
            "Events are not delivered as they should be",
            "No heartbeat from 1 worker.",
            "5000 of the 5000 events that ended in the last 5 minutes are dead.",
            f"Event {poison} (order.placed) was leased by 2 workers that were lost:",
            "1 stream is blocked.",
            "5000 events are dead.",
        ):
            assert each in said
        assert driving.texts(driver, CAUSE) == ["ConnectionError"]

        click(driver, CAUSE)
        assert "courier.example refused" in driving.texts(driver, "#content")[0]

        visit(DASHBOARD)
        click(driver, "#outbox-dead .outbox-action a")
        press(driver, "Save")
        pause = OutboxPause.objects.get()
        assert (pause.kind, pause.name) == ("event_type", "parcel.requested")
        visit(DASHBOARD)
        assert "1 pause is active." in verdict(driver)

        click(driver, "#outbox-paused .outbox-action a")
        press(driver, "Yes: Resume")
        assert "pause is active" not in verdict(driver)

        click(driver, CAUSE)
        click(driver, ".outbox-groups .button.outbox-replay")
        press(driver, "Yes: Replay")
        dead = OutboxEvent.objects.filter(status=Status.DEAD)
        wait_until(lambda: not dead.exists(), within=120, what="5,000 replayed events")
        visit(DASHBOARD)
        assert "events are dead." not in verdict(driver)
        assert "The oldest due event" not in verdict(driver)
        replayed = OutboxAttempt.objects.filter(kind="replayed")
        assert replayed.count() == 5000
        assert {*replayed.values_list("by", flat=True)} == {"operator"}

        driver.find_element(By.PARTIAL_LINK_TEXT, f"Event {poison}").click()
        wait_until(lambda: poison in driver.current_url)
        assert driving.texts(driver, ".outbox-timeline")
