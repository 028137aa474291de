"""System checks of queues: E015, W016 and W017."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.checks import CheckMessage, Error, Warning

import django_outbox as outbox
from django_outbox.listeners import registry
from tests.table import listening
from tests.test_checks import ours, postgres

__all__ = ["postgres"]  # the fixture


E015, W016, W017 = (f"django_outbox.{each}" for each in ("E015", "W016", "W017"))


def hear(event: outbox.Event) -> None:
    """Do nothing."""


def only(name: str) -> list[CheckMessage]:
    return [each for each in ours() if each.id == name]


def test_e015_a_listener_in_a_queue_that_is_not_configured(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}, "mail": {}}}
    with listening(hear, "order.placed", queue="hoks"):
        [error] = only(E015)
    assert isinstance(error, Error)
    assert f"{__name__}.hear (" in error.msg
    assert "test_queue_checks.py:" in error.msg
    assert "listens to 'order.placed' in the queue 'hoks', which" in error.msg
    assert error.msg.endswith(
        'OUTBOX["QUEUES"] does not have; expected one of default, hooks, mail.'
    )
    assert error.hint is not None
    assert error.hint.startswith('Did you mean "hooks"?')
    assert error.hint.endswith("OUTBOX[\"QUEUES\"] = {'hoks': {}}.")


@pytest.mark.parametrize("queue", ["default", "hooks"])
def test_e015_says_nothing_of_queues_that_are_configured(settings: Any, queue: str) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}}}
    with listening(hear, queue=queue):
        assert only(E015) == []


def test_w016_queues_without_a_listener(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_listeners", {})  # without those of the suite, in "default"
    settings.OUTBOX = {"QUEUES": {"default": {"WORKERS": 2}, "hooks": {}, "mail": {}, "sms": {}}}
    with listening(hear, queue="mail"):
        [warning] = only(W016)
    assert isinstance(warning, Warning)
    assert 'of OUTBOX["QUEUES"]: hooks, sms.' in warning.msg
    assert warning.hint == "Give a listener queue=, or remove the queue."
    settings.OUTBOX = {"QUEUES": {"default": {"WORKERS": 2}}}
    assert only(W016) == []


def test_w017_queues_where_all_events_are_one_stream(settings: Any) -> None:
    ordered = {"MODE": "ordered", "ORDERING": "global", "UNROUTABLE_GRACE": 0}
    settings.OUTBOX = {**ordered, "QUEUES": {"hooks": {}}}
    [warning] = only(W017)
    assert isinstance(warning, Warning)
    assert "all events are one stream" in warning.msg
    for outbox_settings in (
        {**ordered, "QUEUES": {"default": {}}},
        {**ordered, "QUEUES": {"hooks": {}}, "ORDERING": "aggregate"},
        {"ORDERING": "global", "QUEUES": {"hooks": {}}},
    ):
        settings.OUTBOX = outbox_settings
        assert only(W017) == []


def test_in_writer_only_and_with_unfit_settings_others_report(settings: Any) -> None:
    for outbox_settings in (
        {"MODE": "writer_only", "QUEUES": {"hooks": {}}},
        {"QUEUES": {"hooks": 5}},
    ):
        settings.OUTBOX = outbox_settings
        with listening(hear, queue="gone"):
            assert not {E015, W016, W017} & {each.id for each in ours()}


def test_w051_counts_the_threads_of_all_queues(postgres: Any, settings: Any) -> None:
    postgres(default={"OPTIONS": {"pool": {"max_size": 11}}})
    settings.OUTBOX = {"WORKERS": 4, "QUEUES": {"hooks": {"WORKERS": 7}}}
    assert only("django_outbox.W051") == []
    settings.OUTBOX = {"WORKERS": 4, "QUEUES": {"hooks": {"WORKERS": 8}}}
    [warning] = only("django_outbox.W051")
    assert "in 12 threads" in warning.msg
    assert "up to 24 more" in (warning.hint or "")
