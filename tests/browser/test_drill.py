"""The drill of an incident: what a person does at three in the morning, from the dashboard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By

from django_outbox.admin import dashboard as dashboard_admin
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxWorker
from django_outbox.worker.housekeeper import work_off_all
from tests.browser import driving, scene
from tests.browser.test_dashboard import DASHBOARD, refresh
from tests.browser.test_path import is_gone, named
from tests.table import histories, insert, now
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Visit = Callable[..., None]
Find = Callable[[], Any]
CAUSE = "#outbox-dead tbody th a"


def verdict(driver: Any) -> str:
    return "\n".join(driving.texts(driver, ".outbox-verdict"))


def by_mouse(driver: Any, find: Find) -> Any:
    (control := find()).click()
    return control


def by_keyboard(driver: Any, find: Find) -> Any:
    """Press Tab until the control has the focus, and shows that it has; then Enter.

    The page may be drawn anew meanwhile, so the control is found again each time.
    """
    for _ in range(240):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        if (focused := driver.switch_to.active_element) == find():
            outline = focused.value_of_css_property("outline-style")
            assert outline != "none" or focused.value_of_css_property("box-shadow") != "none"
            focused.send_keys(Keys.ENTER)
            return focused
    pytest.fail(f"{find().text!r} is not reached by Tab")


class Operator:
    """Uses the controls of a page, and waits for the page behind each."""

    def __init__(self, driver: Any, use: Callable[[Any, Find], Any]) -> None:
        self._driver, self._use = driver, use

    def follow(self, selector: str) -> None:
        """Use the first control that matches."""
        self.use(lambda: self._driver.find_element(By.CSS_SELECTOR, selector))

    def press(self, label: str) -> None:
        """Use the button or link of this name."""
        self.use(lambda: named(self._driver, label))

    def use(self, find: Find) -> None:
        control = self._use(self._driver, find)
        wait_until(lambda: is_gone(control), what="the page behind what was used")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("use", [by_mouse, by_keyboard])
def test_the_drill(driver: Any, visit: Visit, use: Callable[[Any, Find], Any]) -> None:
    """The cause is one click away, its pause two, its replay three; each headline is true."""
    operator = Operator(driver, use)
    with scene.listeners():
        poison = scene.the_drill()
        visit(DASHBOARD)
        said = verdict(driver)
        for each in (
            "Events are not delivered as they should be",
            "has been lost since",
            "5,000 of the 5,000 deliveries that ended in the last 5 minutes are dead",
            f"Event {poison} (order.placed) was leased by 2 workers that were lost since",
            "Key customer-1 is blocked, since",
        ):
            assert each in said
        assert driving.texts(driver, CAUSE) == ["ConnectionError"]

        operator.follow(CAUSE)
        assert "courier.example refused" in driving.texts(driver, "#content")[0]

        visit(DASHBOARD)
        operator.follow("#outbox-dead .outbox-action a")
        operator.press("Save")
        pause = OutboxPause.objects.get()
        assert (pause.kind, pause.name) == ("event_type", "parcel.requested")
        visit(DASHBOARD)
        assert "parcel.requested has been paused since" in verdict(driver)

        operator.follow("#outbox-held .outbox-action a")
        operator.press("Resume")
        visit(DASHBOARD)
        assert "has been paused since" not in verdict(driver)

        operator.follow(CAUSE)
        operator.follow(".outbox-groups .button.outbox-replay")
        operator.press("Yes: Replay")
        dead = OutboxEvent.objects.filter(status=Status.DEAD)
        work_off_all(connection)  # as a worker does
        assert not dead.exists()
        visit(DASHBOARD)
        assert "deliveries are dead, " not in verdict(driver)
        replayed = [each.by for each in histories() if each.kind == "replayed"]
        assert replayed == ["operator"] * 5000

        operator.use(lambda: driver.find_element(By.PARTIAL_LINK_TEXT, f"Event {poison}"))
        assert poison in driver.current_url
        assert driving.texts(driver, ".outbox-timeline")


def at(instant: datetime) -> str:
    return f"{timezone.localtime(instant):%H:%M}"


def test_each_sentence_names_what_is_wrong_why_and_since_when(driver: Any, visit: Visit) -> None:
    """A queue is paused, a broker is away, a worker is lost, then all of them."""
    clock = now()
    since, until = clock - timedelta(minutes=7), clock + timedelta(minutes=40)
    scene.the_drill()
    visit(DASHBOARD)
    lost = OutboxWorker.objects.order_by("heartbeat_at")[0]
    worker = f"Worker {lost.hostname}:{lost.pid} has been lost since {at(lost.heartbeat_at)}"
    assert f"{worker}; 1 of 2 expected workers run." in verdict(driver)

    insert(3, due=-600, event_type="order.paid")
    OutboxPause.objects.pause("queue", "default", reason="stocktaking", by="ada", until=until)
    OutboxPause.objects.update(paused_at=since)
    visit(DASHBOARD)
    paused = (
        f"Queue default has been paused since {at(since)} by ada until {at(until)}: stocktaking; "
    )
    assert f"{paused}3 held for 7 min." in verdict(driver)

    insert(4, due=-60, queue="relay.orders", listener="relay.orders")
    OutboxPause.objects.create(
        kind="breaker",
        name="relay.orders",
        paused_at=since,
        until=until,
        reason="relay.orders: no answer from kafka:9092",
    )
    visit(DASHBOARD)
    away = (
        f"The broker of relay orders has been away since {at(since)}: no answer from kafka:9092; "
    )
    assert f"{away}4 held for 60 s; next try {at(until)}." in verdict(driver).replace(
        "1 min", "60 s"
    )
    assert f"{paused}3 held for 7 min." in verdict(driver)

    OutboxPause.objects.all().delete()
    OutboxWorker.objects.update(heartbeat_at=since)
    visit(DASHBOARD)
    assert f"No worker is alive, since {at(since)}." in verdict(driver)
    assert "is paused" not in verdict(driver) and "is away" not in verdict(driver)


def test_a_page_whose_database_does_not_answer_says_since_when(
    driver: Any, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit(DASHBOARD)
    shown = driving.texts(driver, "[data-part=clock] time")[0]
    thawed = threading.Event()
    read = dashboard_admin.recent_snapshot

    def frozen() -> Any:
        assert thawed.wait(60)
        return read()

    monkeypatch.setattr(dashboard_admin, "recent_snapshot", frozen)
    try:
        refresh(driver)
        wait_until(lambda: driving.texts(driver, ".outbox-lost") != [""], what="the sentence")
        assert shown in driving.texts(driver, ".outbox-lost")[0]
        assert driver.find_elements(By.CSS_SELECTOR, ".outbox-stale")
    finally:
        thawed.set()
    wait_until(lambda: not driver.find_elements(By.CSS_SELECTOR, ".outbox-stale"))
    assert driving.texts(driver, ".outbox-lost") == [""]
