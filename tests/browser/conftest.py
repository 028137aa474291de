"""What a test of pages gets: a site on a free port, and a browser that is signed in there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

BROWSER_SETTINGS = "tests.browser.settings"
# Other settings serve no static files: tox -e browser brings the right ones.
collect_ignore_glob = (
    [] if os.environ.get("DJANGO_SETTINGS_MODULE") == BROWSER_SETTINGS else ["test_*.py"]
)


@pytest.fixture(autouse=True)
def nothing_left_running() -> None:
    """The browser outlives its tests, and starts and ends processes as it likes."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Return the browser of this run. Without one, CI fails and a developer's machine skips."""
    from tests.browser import driving

    if reason := driving.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    driver = driving.start()
    yield driver
    driver.quit()


@pytest.fixture
def operator(db: None) -> Any:
    from django.contrib.auth.models import User

    return User.objects.create_superuser("operator")


@pytest.fixture
def driver(chromium: Any, live_server: Any, operator: Any) -> Iterator[Any]:
    """Return the browser, signed in as ``operator``; its console must have said nothing."""
    from django.test import Client

    from tests.browser import driving

    client = Client()
    client.force_login(operator)
    driving.run_scripts(chromium, allowed=True)
    driving.prefer(chromium, "light")
    driving.log_in(chromium, live_server.url, client.cookies["sessionid"].value)
    driving.complaints(chromium)
    yield chromium
    said = driving.complaints(chromium)
    chromium.get("about:blank")  # nothing asks the server after its test
    assert said == []


@pytest.fixture
def visit(driver: Any, live_server: Any) -> Callable[..., None]:
    """Return a function that opens a page of the admin by its name."""
    from django.urls import reverse

    def visit(name: str, *arguments: str, query: str = "") -> None:
        driver.get(f"{live_server.url}{reverse(f'admin:{name}', args=arguments)}{query}")

    return visit
