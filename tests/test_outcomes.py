"""What listeners answer and raise (rows 94, 303, 304, 307-309, 313; J22)."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import TransactionManagementError

import django_outbox as outbox
from django_outbox import Dead, Defer, Done, RetryAfter, exceptions
from django_outbox.listeners.outcomes import DONE, UNSETTLED, Status
from django_outbox.models import OutboxEvent
from tests.cases import cases

DELAYS = [(0, 0.0), (5, 5.0), (1.5, 1.5), (timedelta(minutes=1), 60.0), (timedelta(0), 0.0)]
NO_DELAYS = [-1, -0.1, timedelta(microseconds=-1), None, "5", True, math.nan, math.inf, 1e11]
NO_DELAYS.append(timedelta.max)


def test_the_numbers_of_status_are_part_of_the_table() -> None:
    """Row 94."""
    for status in (Status, OutboxEvent.Status):
        found = [(each.name, each.value) for each in status]
        assert found == [("NEW", 0), ("DONE", 1), ("RETRY", 2), ("DEAD", 3)]
    assert UNSETTLED == (Status.NEW, Status.RETRY)


@cases(("delay", "seconds"), DELAYS, ids=str)
def test_a_delay_is_seconds_or_a_timedelta(delay: Any, seconds: float) -> None:
    """Rows 304, 313: zero is allowed."""
    assert Defer(delay).delay == seconds
    assert RetryAfter(delay).delay == seconds


@cases("delay", NO_DELAYS, ids=repr)
def test_what_is_no_delay_is_refused_at_construction(delay: Any) -> None:
    """Rows 313, J22."""
    with pytest.raises(ValueError, match="Defer got the delay"):
        Defer(delay)
    with pytest.raises(ValueError, match="RetryAfter got the delay"):
        RetryAfter(delay)


@cases("answer", [Done(), Defer(1), Dead("r"), DONE], ids=repr)
def test_answers_are_frozen_values(answer: Any) -> None:
    """Row 303."""
    assert answer == dataclasses.replace(answer)
    assert not hasattr(answer, "__dict__")
    name = next((each.name for each in dataclasses.fields(answer)), "anything")
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        setattr(answer, name, 1)


@cases("reason", [None, 5, b"x", ValueError()], ids=repr)
def test_a_reason_is_text(reason: Any) -> None:
    """J22."""
    with pytest.raises(ValueError, match="Dead got the reason"):
        Dead(reason)


def test_retry_after_keeps_message_and_cause() -> None:
    """Rows 307, G16."""
    cause = KeyError("x")
    with pytest.raises(RetryAfter, match=r"^rate limited$") as caught:
        raise RetryAfter(5, "rate limited") from cause
    assert caught.value.__cause__ is cause
    assert str(RetryAfter(1.5)) == "retry after 1.5 s"


# --- the error tree -----------------------------------------------------------------------------

TREE: dict[type[Exception], tuple[type[Exception], ...]] = {
    outbox.NoActiveTransaction: (outbox.OutboxError, TransactionManagementError),
    outbox.InvalidEvent: (outbox.OutboxError, ValueError),
    outbox.PayloadTooLarge: (outbox.InvalidEvent,),
    outbox.DuplicateEvent: (outbox.OutboxError,),
    outbox.ListenerAlreadyRegistered: (outbox.OutboxError,),
    outbox.UnroutableEvent: (outbox.OutboxError,),
    outbox.PayloadError: (outbox.OutboxError,),
    outbox.ListenerTimeout: (outbox.OutboxError,),
    outbox.OutboxError: (Exception,),
    outbox.RetryAfter: (Exception,),
    outbox.Unrecoverable: (Exception,),
    outbox.BrokerUnavailable: (Exception,),
}


@cases("error", TREE, ids=lambda each: each.__name__)
def test_the_error_tree(error: type[Exception]) -> None:
    """Rows 309, +3."""
    assert error.__bases__ == TREE[error]


def test_the_tree_is_whole_and_drawn() -> None:
    """Rows 309, +3: in the module's docstring."""
    defined = {
        each
        for each in vars(exceptions).values()
        if isinstance(each, type) and each.__module__ == exceptions.__name__
    }
    assert defined == {*TREE}
    assert all(each.__name__ in (exceptions.__doc__ or "") for each in TREE)
    assert not any(issubclass(each, ImproperlyConfigured) for each in TREE)
