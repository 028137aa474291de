"""Hostile texts on the pages of the admin: a browser shows them, and does nothing that they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urldefrag, urlsplit

import pytest
from django.urls import reverse
from selenium.common.exceptions import UnexpectedAlertPresentException
from selenium.webdriver.common.by import By

from django_outbox.models import OutboxEvent
from tests.browser import driving, policy, scene
from tests.browser.test_path import EVENT, EVENTS, press

# Each makes an element of the class xss, or runs a script, where it is taken for markup.
CORPUS = {
    "script": "<script class=xss>window.__xss=1</script>",
    "image": "\"'><img class=xss src=x: onerror=window.__xss=2>",
    "vector": "</pre></textarea></title></style><svg class=xss onload=alert(3)>",
    "attribute": "\" autofocus onfocus='window.__xss=4' class='xss' x=\"",
    "json": '"}]}</script><script class=xss>window.__xss=5</script>',
    "link": "javascript:window.__xss=6//<a class=xss>",
    "template": "{{ 7|add:7 }}{% now 'Y' %}<b class=xss>&lt;i class=xss&gt;",
}
TRIGGER = "document.querySelectorAll('[onfocus]').forEach(each => each.focus())"
LAX = "default-src * data: 'unsafe-inline' 'unsafe-eval'"
# Small files of the site of ours, not pages; and what signs the visitor out.
NO_PAGES = ("/logout/", "/jsi18n/", "/password_change/", "/static/")


@pytest.fixture
def lax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the site allow inline scripts, so that escaping alone keeps them from running."""
    monkeypatch.setattr(policy, "POLICY", LAX)


def harm(driver: Any) -> list[Any]:
    """Return what a hostile text has done to the page that is open."""
    try:
        driver.execute_script(TRIGGER)
        done = driver.execute_script("return window.__xss")
    except UnexpectedAlertPresentException as error:
        return [error.msg]
    made = driver.find_elements(By.CSS_SELECTOR, ".xss, a[href^='javascript:' i]")
    return [each.get_attribute("outerHTML") for each in made] + ([done] if done else [])


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_does_harm_where_it_is_not_escaped(driver: Any, name: str) -> None:
    for place in ("<p>%s", '<a href="%s">x</a>', "<textarea>%s"):
        page = quote(place % CORPUS[name])
        driver.get(f"data:text/html,<!doctype html><link rel=icon href=data:,>{page}")
        if harm(driver):
            break
    else:
        pytest.fail("a page that does not escape it is none the worse")
    driver.get("about:blank")
    driver.get_log("browser")  # a broken image is no complaint here


# --- every page ---------------------------------------------------------------------------------


def crawl(driver: Any, root: str, *starts: str, most: int = 120) -> Iterator[str]:
    """Open the pages of the outbox that these link to, one of each kind, and yield their paths."""
    waiting, kinds, opened = list(starts), set(), 0
    while waiting and opened < most:
        url = waiting.pop(0)
        if (place := kind(url)) in kinds:
            continue
        kinds.add(place)
        driver.get(root + url)
        opened += 1
        # What takes no GET is followed all the same: a link may lead a person, or a robot, there.
        said = [each for each in driving.complaints(driver) if "status of 405" not in each]
        assert said == [], url
        yield url
        waiting += links(driver, root)
    assert not waiting or opened < most, f"more than {most} pages"


def links(driver: Any, root: str) -> list[str]:
    """Return where the page leads within the admin; forms and their buttons count, too."""
    found = driver.execute_script(
        "return [...document.querySelectorAll('[href], [action], [formaction]')].map("
        "each => each.formAction || each.href || each.action)"
    )
    within = f"{root}{reverse('admin:index')}"
    ours = [urldefrag(each).url for each in found if str(each).startswith(within)]
    urls = [each.removeprefix(root) for each in ours]
    return [each for each in urls if not any(part in each for part in NO_PAGES) and our(each)]


def our(url: str) -> bool:
    return "/django_outbox/" in url or url == reverse("admin:index")


def kind(url: str) -> tuple[str, tuple[str, ...]]:
    """Return what makes it another page: its path, and one filter at a time with its value."""
    parts = urlsplit(url)
    query = [
        name if name in "o p e all event_type listener error".split() else f"{name}={value}"
        for name, value in parse_qsl(parts.query)
        if not re.match(r"_changelist_filters|written", name)
    ]
    return parts.path, tuple(sorted(query)[:1])


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.timeout(300)
def test_no_page_obeys_a_hostile_text(
    driver: Any, live_server: Any, visit: Callable[..., None], lax: None, name: str
) -> None:
    """Row: XSS corpus in every text field. Complaints of the console fail it, too."""
    text = CORPUS[name]
    scene.evil(text)
    visited = []
    starts = [reverse(f"admin:{page}") for page in ("index", EVENTS)]
    state = f"{reverse('admin:django_outbox_outboxstream_changelist')}?state=all"
    for url in crawl(driver, live_server.url, *starts, state):
        visited.append(url)
        assert harm(driver) == [], url
        assert "1414" not in driver.find_element(By.TAG_NAME, "body").text
    paths = "\n".join(unquote(urlsplit(each).path) for each in visited)
    for part in (
        "/replay/",
        "/discard/",
        "/groups/",
        "/all/",
        "/change/",
        "outboxstream/",
        "outboxpause/",
        "outboxstatistics/",
    ):
        assert part in paths, visited

    event = OutboxEvent.objects.dead().get()
    for press_this in ("Replay", "Yes: Replay"):
        if press_this == "Replay":
            visit(EVENT, acting_id(event))
        press(driver, press_this)
        assert harm(driver) == []
    visit("index")  # the log of what was done
    assert harm(driver) == []


def acting_id(event: OutboxEvent) -> str:
    from django.contrib.admin.utils import quote

    return str(quote(event.pk))
