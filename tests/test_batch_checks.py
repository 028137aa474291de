"""System check of batch listeners: W018."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.checks import Warning

import django_outbox as outbox
from tests.table import listening
from tests.test_checks import ours

W018 = "django_outbox.W018"


@contextmanager
def for_events(event: outbox.Event) -> Iterator[None]:
    yield


@contextmanager
def for_both(subject: Any) -> Iterator[None]:
    yield


for_both.batch = True  # type: ignore[attr-defined]


def load(events: list[outbox.Event]) -> None:
    """Do nothing."""


def warnings() -> list[Warning]:
    return [each for each in ours() if each.id == W018]


def test_w018_names_interceptors_that_batches_leave_out(settings: Any) -> None:
    settings.OUTBOX = {"INTERCEPTORS": [f"{__name__}.for_events", f"{__name__}.for_both"]}
    assert warnings() == []
    with listening(load, "order.placed", batch=5):
        [warning] = warnings()
        assert f"{__name__}.for_events" in warning.msg
        assert f"{__name__}.for_both" not in warning.msg
        assert f"{__name__}.load (" in warning.msg
        settings.OUTBOX = {"INTERCEPTORS": [f"{__name__}.for_both"]}
        assert warnings() == []
        settings.OUTBOX = {"INTERCEPTORS": [f"{__name__}.for_events"], "MODE": "writer_only"}
        assert warnings() == []
