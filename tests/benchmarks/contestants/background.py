"""A task of django.tasks must stand in a module of its own."""

from __future__ import annotations

from typing import Any

from django.tasks import task

heard: list[Any] = []  # the contestant's method


@task
def hear(number: int, payload: dict[str, Any]) -> None:
    heard[0](number)
