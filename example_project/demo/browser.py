"""A visitor without a screen: Django's test client, filling forms in as a browser does."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from django.http import HttpResponse
from django.test import Client
from django.urls import reverse


class Form(HTMLParser):
    """The hidden fields of the last POST form on a page."""

    def __init__(self, page: HttpResponse) -> None:
        super().__init__()
        self.hidden: dict[str, list[str]] = {}
        self.feed(page.content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name")
        if tag == "form":
            self.hidden = {}
        elif tag == "input" and name and given.get("type") == "hidden":
            self.hidden.setdefault(name, []).append(given.get("value") or "")


class Visitor:
    """One browser session; every POST carries the CSRF token of the page it comes from."""

    def __init__(self) -> None:
        self.client = Client(enforce_csrf_checks=True, SERVER_NAME="localhost")

    def fill_in(self, url: str, values: Mapping[str, Any]) -> HttpResponse:
        """Get the page, fill its form in and send it."""
        form = Form(self.client.get(url))
        return self.client.post(url, {**form.hidden, **values})

    def log_in(self, username: str, password: str) -> None:
        url = reverse("admin:login")
        page = self.fill_in(url, {"username": username, "password": password})
        if page.status_code != 302:
            raise PermissionError(f"The admin does not let {username} in.")

    def act(self, model: str, action: str, *pks: object) -> HttpResponse:
        """Run an action on rows of an admin list, and confirm it where the admin asks back."""
        url = reverse(f"admin:{model}_changelist")
        page = self.fill_in(url, {"action": action, "_selected_action": [*map(str, pks)]})
        return self.client.post(url, Form(page).hidden) if page.status_code == 200 else page
