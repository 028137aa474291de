"""The pictures of the documentation: ``python -m tests.browser.screenshots`` writes docs/images."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1280  # pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One page as it looks in one situation."""

    name: str
    url: str  # a name of a page of the admin
    scene: Callable[[], Sequence[str]]  # returns the arguments of the url
    scheme: str = "light"
    height: int | None = None  # pixels; the whole page where none is given
    ready: str = "#content"  # what is there once the page is whole


def pictures() -> list[Picture]:
    from tests.browser import scene

    dashboard = "admin:django_outbox_outboxstatistics_changelist"
    return [
        Picture(name="dashboard", url=dashboard, scene=scene.at_three_in_the_morning),
        Picture(
            name="dashboard-dark", url=dashboard, scene=scene.at_three_in_the_morning, scheme="dark"
        ),
        Picture(
            name="dashboard-top", url=dashboard, scene=scene.at_three_in_the_morning, height=960
        ),
        Picture(
            name="dead-event",
            url="admin:django_outbox_outboxevent_change",
            scene=scene.a_refused_parcel,
        ),
    ]


def main(*names: str) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.browser.settings"
    import django

    django.setup()

    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.test.testcases import LiveServerThread
    from django.test.utils import setup_databases, teardown_databases

    from django_outbox.listeners import registry
    from tests.browser import scene

    for each in registry.listeners():  # those of the test app are in no picture
        registry.remove(each.call)
    databases = setup_databases(verbosity=0, interactive=False)
    server = LiveServerThread("127.0.0.1", StaticFilesHandler, port=0)
    server.daemon = True
    server.start()
    server.is_ready.wait()
    try:
        with scene.listeners():
            for each in pictures():
                if not names or each.name in names:
                    _take(each, f"http://127.0.0.1:{server.port}")
    finally:
        server.terminate()
        teardown_databases(databases, verbosity=0)


def _take(picture: Picture, root: str) -> None:
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client
    from django.urls import reverse
    from selenium.webdriver.common.by import By

    from tests.browser import driving
    from tests.waiting import wait_until

    call_command("flush", verbosity=0, interactive=False)
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    arguments = picture.scene()
    driver = driving.start(width=WIDTH)
    try:
        driving.log_in(driver, root, client.cookies["sessionid"].value)
        driving.prefer(driver, picture.scheme)
        driver.get(f"{root}{reverse(picture.url, args=arguments)}")
        wait_until(lambda: driver.find_elements(By.CSS_SELECTOR, picture.ready))
        driving.show(driver, picture.height)
        IMAGES.mkdir(exist_ok=True)
        path = IMAGES / f"{picture.name}.png"
        assert driver.save_screenshot(str(path))
        sys.stdout.write(f"{path}\n")
    finally:
        driver.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
