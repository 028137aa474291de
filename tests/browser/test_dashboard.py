"""The dashboard in a real browser, under a policy that allows nothing inline (row +41)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from django_outbox.admin import dashboard as dashboard_admin
from django_outbox.models import OutboxWorker
from tests.browser import driving, scene
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

DASHBOARD = "django_outbox_outboxstatistics_changelist"
SCREEN = 900  # pixels of height


@pytest.fixture(autouse=True)
def nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_admin, "_latest", {})
    monkeypatch.setattr(dashboard_admin, "MAX_AGE", 0)
    monkeypatch.setattr(dashboard_admin, "MAX_STALE", 0)  # no refresh shows what the last one read


@pytest.fixture
def dashboard(visit: Callable[..., None], driver: Any) -> Any:
    """Open the dashboard when everything goes wrong."""
    scene.at_three_in_the_morning()
    visit(DASHBOARD)
    return driver


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_41_charts_have_the_colours_of_the_theme(
    driver: Any, visit: Callable[..., None], scheme: str
) -> None:
    scene.at_three_in_the_morning()
    driving.prefer(driver, scheme)
    visit(DASHBOARD)
    line = driver.find_element(By.CSS_SELECTOR, ".outbox-plot .outbox-done")
    colour = {"light": "rgb(30, 123, 74)", "dark": "rgb(91, 208, 143)"}[scheme]
    assert line.value_of_css_property("stroke") == colour
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 18, 18)"}[scheme]


def test_41_without_javascript_it_is_whole(driver: Any, visit: Callable[..., None]) -> None:
    scene.at_three_in_the_morning()
    driving.run_scripts(driver, allowed=False)
    visit(DASHBOARD)
    assert "Queue default is" in driving.texts(driver, ".outbox-verdict")[0]
    assert len(driver.find_elements(By.CSS_SELECTOR, ".outbox-plot path")) == 3
    assert "done" in driving.texts(driver, "#outbox-throughput-legend")[0]
    assert driving.texts(driver, "#outbox-workers tbody th")[0].startswith("worker-1")
    assert not driver.find_element(By.CSS_SELECTOR, ".outbox-pause").is_displayed()


def test_41_it_refreshes_in_place(dashboard: Any) -> None:
    bar = dashboard.find_element(By.CSS_SELECTOR, ".outbox-bar")
    OutboxWorker.objects.create(
        id="new",
        hostname="web-9",
        pid=9,
        info=json.dumps({"held": 7}),
        **OutboxWorker.objects.values("started_at", "heartbeat_at")[0],
    )
    assert "web-9" not in driving.texts(dashboard, "#outbox-workers")[0]
    dashboard.execute_script(CLOCK)
    refresh(dashboard)
    wait_until(lambda: waits(dashboard))

    def is_seen() -> bool:
        ring(dashboard)
        return "web-9" in driving.texts(dashboard, "#outbox-workers")[0]

    wait_until(is_seen)
    assert bar.is_displayed()  # the page was not loaded anew
    assert not dashboard.find_element(By.CSS_SELECTOR, ".outbox-lost").is_displayed()


def refresh(driver: Any) -> None:
    """Pause and go on: the page refreshes at once."""
    for _ in range(2):
        driver.find_element(By.CSS_SELECTOR, ".outbox-pause").click()


CLOCK = """
window.asked = []; window.slow = 0;
const real = window.setTimeout, ask = window.fetch;
let late = 0;
window.setTimeout = (call, wait) =>
  wait >= 5000 ? window.asked.push([call, wait]) : real(call, wait);
window.fetch = (...given) =>
  ask(...given).then((answer) => {
    late += window.slow;
    return answer;
  });
performance.now = () => late;
"""


def waits(driver: Any) -> list[float]:
    """Return the milliseconds of the timers that the page has set."""
    return list(driver.execute_script("return window.asked.map((each) => each[1])"))


def ring(driver: Any) -> None:
    """End the timer of the page, and wait for the next."""
    driver.execute_script("window.asked.pop()[0]()")
    wait_until(lambda: len(waits(driver)) == 1)


def test_41_it_refreshes_by_itself_until_it_is_paused(dashboard: Any) -> None:
    """The clock of the page is the test's: no test waits for a quarter of a minute."""
    dashboard.execute_script(CLOCK)
    refresh(dashboard)
    wait_until(lambda: waits(dashboard) == [5_000])
    ring(dashboard)
    assert waits(dashboard) == [5_000]
    dashboard.execute_script("window.slow = 1000")  # milliseconds
    ring(dashboard)
    assert 50_000 <= waits(dashboard)[0] <= 70_000
    dashboard.execute_script("window.slow = 60_000")
    ring(dashboard)
    assert waits(dashboard) == [300_000]
    dashboard.execute_script("window.asked = []; window.slow = 0")
    button = dashboard.find_element(By.CSS_SELECTOR, ".outbox-pause")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "true"
    assert waits(dashboard) == []


def test_a_page_whose_server_does_not_answer_is_grey(dashboard: Any) -> None:
    """As with a database that is frozen: what it shows may be long past."""
    dashboard.execute_script(CLOCK)
    dashboard.execute_script(
        "window.fetch = (url, { signal }) => new Promise(() => (window.signal = signal))"
    )
    main = dashboard.find_element(By.CSS_SELECTOR, "#content-main")
    refresh(dashboard)
    assert "outbox-stale" not in main.get_attribute("class").split()
    wait_until(lambda: "outbox-stale" in main.get_attribute("class").split())
    assert "Not refreshed" in driving.texts(dashboard, ".outbox-lost")[0]
    wait_until(lambda: dashboard.execute_script("return window.signal.aborted"))


def test_a_hidden_tab_asks_for_nothing(dashboard: Any) -> None:
    hide = "Object.defineProperty(document, 'hidden', { configurable: true, get: () => %s });"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    dashboard.execute_script(CLOCK)
    dashboard.execute_script(hide % "true" + tell)
    assert waits(dashboard) == []
    dashboard.execute_script(hide % "false" + tell)
    wait_until(lambda: waits(dashboard) == [5_000])


def test_41_who_was_signed_out_is_told(dashboard: Any) -> None:
    dashboard.delete_all_cookies()
    refresh(dashboard)
    wait_until(lambda: "signed out" in driving.texts(dashboard, ".outbox-lost")[0])
    assert driving.texts(dashboard, "#outbox-workers")  # what was seen last stays


# --- sizes ----------------------------------------------------------------------------------------


@pytest.fixture
def trouble(driver: Any, visit: Callable[..., None]) -> Iterator[Callable[[int], None]]:
    """Return a function that opens the dashboard in the worst trouble, in a window so wide."""
    scene.in_trouble()

    def opened(width: int) -> None:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": SCREEN, "deviceScaleFactor": 1, "mobile": False},
        )
        visit(DASHBOARD)

    yield opened
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_in_trouble_it_is_two_screens_and_a_half_long(
    trouble: Callable[..., None], driver: Any
) -> None:
    trouble(1400)
    assert driver.execute_script("return document.documentElement.scrollHeight") <= 2.5 * SCREEN
    place = "return document.querySelector('#outbox-charts').getBoundingClientRect().top"
    assert driver.execute_script(place) < SCREEN


WIDER = """
return [...document.querySelectorAll(".outbox-section .outbox-scroll")]
  .filter((each) => each.scrollWidth > each.clientWidth + 1)
  .map((each) => each.getAttribute("aria-labelledby"));
"""
BROKEN = """
// Words that stand on two lines though nothing in them allows a break.
const found = [], range = document.createRange();
for (const cell of document.querySelectorAll(".outbox-section :is(td, th), .outbox-tiles > div")) {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const word of texts.currentNode.data.matchAll(/[\\p{L}\\p{N}]{2,}/gu)) {
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((each) => Math.round(each.top))).size > 1) {
        found.push(word[0]);
      }
    }
  }
}
return found;
"""


def test_no_table_loses_columns_and_no_word_breaks(
    trouble: Callable[..., None], driver: Any
) -> None:
    trouble(1400)
    assert driver.execute_script(WIDER) == []
    assert driver.execute_script(BROKEN) == []
    trouble(400)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 400
    assert driver.execute_script(BROKEN) == []


def test_on_a_telephone_each_button_is_in_sight(trouble: Callable[..., None], driver: Any) -> None:
    trouble(400)
    buttons = driver.find_elements(By.CSS_SELECTOR, ".outbox-action .button")
    names = {each.text.replace("\n", " ") for each in buttons}
    assert names >= {"Resume", "Pause parcel.requested"}
    for each in buttons:
        assert each.rect["x"] >= 0 and each.rect["x"] + each.rect["width"] <= 400, each.text


def test_the_form_of_a_pause_fits_a_telephone_in_a_theme_of_any_kind(
    trouble: Callable[..., None], visit: Callable[..., None], driver: Any
) -> None:
    """Another theme brings its own styles instead of Django's, but ours stay."""
    trouble(400)
    visit("django_outbox_outboxpause_add")
    driver.execute_script(
        "for (const each of document.styleSheets) each.disabled = !/outbox/.test(each.href);"
        "for (const each of document.querySelectorAll('#header, .breadcrumbs')) each.remove();"
    )
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 400
