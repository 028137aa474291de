"""The dashboard in a real browser, under a policy that allows nothing inline (row +41)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from django_outbox.models import OutboxWorker
from tests.browser import driving, scene
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

DASHBOARD = "django_outbox_outboxstatistics_changelist"
CHARTS = ["throughput", "failures", "wait", "run", "lag", "workers"]


@pytest.fixture
def dashboard(visit: Callable[..., None], driver: Any) -> Any:
    """Open the dashboard when everything goes wrong, and wait for its charts."""
    scene.at_three_in_the_morning()
    visit(DASHBOARD)
    drawn(driver)
    return driver


def drawn(driver: Any) -> None:
    wait_until(lambda: len(driver.find_elements(By.CSS_SELECTOR, ".outbox-plot canvas")) == 6)


def colours(driver: Any, name: str) -> set[tuple[int, int, int]]:
    """The opaque colours of a chart's pixels."""
    pixels = driver.execute_script(
        """
        const canvas = document.querySelector(`[data-chart="${arguments[0]}"] canvas`);
        const copy = document.createElement("canvas");  // of one that is often read
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const read = copy.getContext("2d", { willReadFrequently: true });
        read.drawImage(canvas, 0, 0);
        const { data } = read.getImageData(0, 0, canvas.width, canvas.height);
        const found = new Set();
        for (let at = 0; at < data.length; at += 4) {
          if (data[at + 3] === 255) found.add(data.slice(at, at + 3).join());
        }
        return [...found];
        """,
        name,
    )
    return {tuple(map(int, each.split(","))) for each in pixels}


def rgb(driver: Any, variable: str) -> tuple[int, ...]:
    style = "getComputedStyle(document.documentElement)"
    value = driver.execute_script(f"return {style}.getPropertyValue('{variable}').trim()")
    return tuple(int(value[at : at + 2], 16) for at in (1, 3, 5))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_41_charts_are_drawn_in_the_colours_of_the_theme(
    driver: Any, visit: Callable[..., None], scheme: str
) -> None:
    scene.at_three_in_the_morning()
    driving.prefer(driver, scheme)
    visit(DASHBOARD)
    drawn(driver)
    for name, tone in {"throughput": "done", "failures": "retry", "workers": "workers"}.items():
        assert rgb(driver, f"--outbox-{tone}") in colours(driver, name), name
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 18, 18)"}[scheme]


def test_41_the_theme_s_switch_redraws_the_charts(dashboard: Any) -> None:
    light = rgb(dashboard, "--outbox-done")
    dashboard.execute_script("document.documentElement.dataset.theme = 'dark'")
    wait_until(lambda: rgb(dashboard, "--outbox-done") in colours(dashboard, "throughput"))
    assert rgb(dashboard, "--outbox-done") != light
    assert light not in colours(dashboard, "throughput")


def test_41_without_javascript_it_is_whole(driver: Any, visit: Callable[..., None]) -> None:
    scene.at_three_in_the_morning()
    driving.run_scripts(driver, allowed=False)
    visit(DASHBOARD)
    assert not driver.find_elements(By.CSS_SELECTOR, "canvas")
    assert "The oldest due event has waited" in driving.texts(driver, ".outbox-verdict")[0]
    assert len(driver.find_elements(By.CSS_SELECTOR, ".outbox-plot .outbox-sketch path")) == 13
    assert "done" in driving.texts(driver, "#outbox-throughput-legend")[0]
    assert driving.texts(driver, "#outbox-workers tbody th")[0].startswith("worker-1")
    assert not driver.find_element(By.CSS_SELECTOR, ".outbox-pause").is_displayed()
    driver.find_element(By.LINK_TEXT, "24 hours").click()
    assert driving.texts(driver, "nav [aria-current=true]") == ["24 hours"]
    driver.find_element(By.CSS_SELECTOR, ".outbox-figures summary").click()
    assert len(driving.texts(driver, ".outbox-figures tbody tr")) == 144


def test_41_what_is_wrong_comes_first(dashboard: Any) -> None:
    parts = [each.get_attribute("id") for each in dashboard.find_elements(By.TAG_NAME, "section")]
    assert parts[0] == "outbox-workers"
    assert parts.index("outbox-dead") < parts.index("outbox-charts") < parts.index("outbox-types")


def test_41_everything_is_reached_by_the_keyboard(dashboard: Any) -> None:
    wanted = {"a[aria-current]", ".outbox-again", ".outbox-pause", ".outbox-verdict a", "summary"}
    wanted |= {
        "#outbox-workers .outbox-scroll",
        "#outbox-dead a",
        "#outbox-listeners .outbox-scroll",
    }
    for _ in range(150):
        dashboard.switch_to.active_element.send_keys(Keys.TAB)
        here = "return arguments[0].filter((each) => document.activeElement.matches(each))"
        wanted -= {*dashboard.execute_script(here, [*wanted])}
        if not wanted:
            return
    assert wanted == set()


def test_41_what_the_eye_sees_has_a_name(dashboard: Any) -> None:
    tree = dashboard.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]

    def names(role: str) -> list[str]:
        return [each["name"]["value"] for each in tree
                if each.get("role", {}).get("value") == role and not each["ignored"]]  # fmt: skip

    images = names("image") + names("img")
    for title in ("Delivered", "Not delivered", "Schedule to start", "Oldest due event"):
        assert any(each.startswith(title) for each in images), (title, images)
    assert {"Workers", "Dead events by cause", "Blocked streams"} <= {*names("region")}
    assert all(names("button")), names("button")
    assert "Events are not delivered as they should be" in names("heading")


def test_41_it_refreshes_in_place(dashboard: Any) -> None:
    canvas = dashboard.find_element(By.CSS_SELECTOR, "canvas")
    OutboxWorker.objects.create(
        id="new", hostname="web-9", pid=9, info=json.dumps({"held": 7}),
        **OutboxWorker.objects.values("started_at", "heartbeat_at")[0],
    )  # fmt: skip
    assert "web-9" not in driving.texts(dashboard, "#outbox-workers")[0]
    dashboard.find_element(By.CSS_SELECTOR, ".outbox-again").click()
    wait_until(lambda: "web-9" in driving.texts(dashboard, "#outbox-workers")[0])
    assert canvas.is_displayed()  # the page was not loaded anew
    assert not dashboard.find_element(By.CSS_SELECTOR, ".outbox-lost").is_displayed()


def test_41_it_refreshes_by_itself_until_it_is_paused(dashboard: Any) -> None:
    """The clock of the page is the test's: no test waits for a quarter of a minute."""
    button = dashboard.find_element(By.CSS_SELECTOR, ".outbox-pause")
    asked = (
        "return performance.getEntriesByType('resource')"
        ".filter((each) => each.initiatorType === 'fetch').length"
    )
    dashboard.execute_script(
        "window.asked = []; const real = window.setTimeout; window.setTimeout = "
        "(call, wait) => (wait > 5000 ? window.asked.push(call) : real(call, wait));"
    )
    dashboard.find_element(By.CSS_SELECTOR, ".outbox-again").click()
    wait_until(lambda: dashboard.execute_script("return window.asked.length") == 1)
    before = dashboard.execute_script(asked)
    dashboard.execute_script("window.asked.pop()()")
    wait_until(lambda: dashboard.execute_script(asked) == before + 1)
    wait_until(lambda: dashboard.execute_script("return window.asked.length") == 1)
    dashboard.execute_script("window.asked = []")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "true"
    dashboard.find_element(By.CSS_SELECTOR, ".outbox-again").click()
    wait_until(lambda: dashboard.execute_script(asked) == before + 2)
    wait_until(lambda: dashboard.execute_script("return document.readyState") == "complete")
    assert dashboard.execute_script("return window.asked.length") == 0


def test_41_who_was_signed_out_is_told(dashboard: Any) -> None:
    dashboard.delete_all_cookies()
    dashboard.find_element(By.CSS_SELECTOR, ".outbox-again").click()
    wait_until(lambda: "signed out" in driving.texts(dashboard, ".outbox-lost")[0])
    assert driving.texts(dashboard, "#outbox-workers")  # what was seen last stays


def test_41_where_the_mouse_is_the_legend_tells_the_values(dashboard: Any) -> None:
    from selenium.webdriver import ActionChains

    legend = driving.texts(dashboard, "#outbox-lag-legend")[0]
    plot = dashboard.find_element(By.CSS_SELECTOR, '[data-chart="lag"] .u-over')
    ActionChains(dashboard).move_to_element_with_offset(plot, -100, 0).perform()
    wait_until(lambda: driving.texts(dashboard, "#outbox-lag-legend")[0] != legend)
