"""What axe-core finds wrong with the pages of the admin, in light and dark, narrow and wide.

What it finds on a page of Django's own, of users, is Django's: the same rule at the same element.
So is what it says of a search field with a help text, which that page does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import axe_core_python
import pytest

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.browser import driving, scene
from tests.browser.test_dashboard import DASHBOARD

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text()
FIND = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => done(
  violations.flatMap(({id, nodes}) => nodes.map(({target, html}) => [id, target.join(" "), html]))
));
"""
EVENT, PAUSE, STREAM = (f"django_outbox_outbox{each}" for each in ("event", "pause", "stream"))

Visit = Callable[..., None]
Finding = tuple[str, str, str]  # the rule, where, the element


def found(driver: Any) -> set[Finding]:
    """Return what axe finds on the page that is open."""
    driver.execute_script(AXE)
    return {tuple(each) for each in driver.execute_async_script(FIND)}


def pages() -> Iterator[tuple[str, list[str], str]]:
    """Return the pages: their names, arguments and queries."""
    dead = str(OutboxEvent.objects.filter(status=Status.DEAD).latest("pk").pk)
    yield DASHBOARD, [], ""
    yield f"{EVENT}_changelist", [], ""
    yield f"{EVENT}_changelist", [], "?state=dead"
    yield f"{EVENT}_changelist", [], "?q=customer-1181"
    yield f"{EVENT}_change", [dead], ""
    yield f"{EVENT}_discard", [dead], ""
    yield f"{EVENT}_replay_all", [], "?state=dead"
    yield f"{EVENT}_groups", [], ""
    yield f"{PAUSE}_changelist", [], ""
    yield f"{PAUSE}_add", [], ""
    yield f"{STREAM}_changelist", [], ""
    yield f"{STREAM}_change", ["customer-1181"], ""


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_of_ours(driver: Any, visit: Visit, scheme: str, width: int) -> None:
    driving.prefer(driver, scheme)
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    try:
        with scene.listeners():
            scene.in_trouble()
            of_django = {("label-title-only", "#searchbar")}
            for name in ("auth_user_changelist", "auth_user_add"):
                visit(name)
                of_django |= {(rule, where) for rule, where, _ in found(driver)}
            ours: dict[str, set[Finding]] = {}
            for name, arguments, query in pages():
                visit(name, *arguments, query=query)
                if left := {each for each in found(driver) if each[:2] not in of_django}:
                    ours[f"{name}{query}"] = left
        assert ours == {}
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_axe_would_find_something(driver: Any, visit: Visit) -> None:
    visit(DASHBOARD)
    driver.execute_script(
        "document.querySelector('#content').append(document.createElement('img'))"
    )
    assert "image-alt" in {rule for rule, _, _ in found(driver)}
