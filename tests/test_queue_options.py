"""``outbox_worker --queue`` and ``--exclude-queue``: which queues a worker serves."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from django.core.management import CommandError, call_command

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.cases import cases
from tests.surroundings import printed
from tests.table import insert, listening

pytestmark = pytest.mark.django_db(transaction=True)

COMMAND = "django_outbox.management.commands.outbox_worker"
once = partial(printed, "outbox_worker", "--once")


@pytest.fixture(autouse=True)
def three_queues(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}, "mail": {}}}


def hear(event: outbox.Event) -> None:
    """Do nothing."""


class Ended(Exception):
    """Ends the command where the process would end."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run no worker; return what each function that would run them was given."""
    calls: dict[str, Any] = {}

    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(f"{COMMAND}.os._exit", end)
    for name in ("run", "run_reloading"):
        monkeypatch.setattr(
            f"{COMMAND}.{name}", lambda aliases, name=name, **options: calls.update({name: options})
        )
    return calls


def start(*arguments: str) -> None:
    with pytest.raises(Ended):
        call_command("outbox_worker", *arguments)


@pytest.mark.parametrize(
    ("arguments", "served"),
    [
        ([], None),
        (["--queue", "hooks"], ["hooks"]),
        (["--queue", "mail", "--queue", "default", "--queue", "mail"], ["mail", "default"]),
        (["--exclude-queue", "hooks"], ["default", "mail"]),
        (["--exclude-queue", "hooks", "--exclude-queue", "default"], ["mail"]),
        (["--queue", "hooks", "--queue", "mail", "--exclude-queue", "mail"], ["hooks"]),
    ],
    ids=["all", "one", "two", "all-but-one", "all-but-two", "both"],
)
@pytest.mark.parametrize(
    ("how", "by"), [([], "run"), (["--processes", "2"], "run"), (["--reload"], "run_reloading")]
)
def test_workers_are_told_which_queues_to_serve(
    given: dict[str, Any], arguments: list[str], served: Any, how: list[str], by: str
) -> None:
    start(*how, *arguments)
    assert [*given] == [by]
    assert given[by]["queues"] == served


def test_once_delivers_from_these_queues_only() -> None:
    for queue in ("default", "hooks", "mail"):
        insert(2, event_type=f"{queue}.x", queue=queue)
    with (
        listening(hear, "default.x"),
        listening(hear, "hooks.x", queue="hooks"),
        listening(hear, "mail.x", queue="mail"),
    ):
        assert once("--queue", "hooks") == "delivered 2"
        assert left() == {"default": 2, "mail": 2}
        assert once("--exclude-queue", "mail", "--max-events", "1") == "delivered 1"
        assert left() == {"default": 1, "mail": 2}
        assert once() == "delivered 3"


def left() -> Counter[str]:
    return Counter(OutboxEvent.objects.pending().values_list("queue", flat=True))


@cases(
    ("arguments", "says"),
    [
        (["--queue", "hoks"], "does not have 'hoks'; expected one of default, hooks, mail."),
        (["--exclude-queue", "Hooks"], "does not have 'Hooks'; expected one of default, hooks"),
        (["--queue", "a", "--exclude-queue", "b", "--queue", "a"], "does not have 'a', 'b'; exp"),
        (["--queue", "hooks", "--exclude-queue", "hooks"], "leaves no queue to serve; expected"),
        ([f"--exclude-queue={each}" for each in ("default", "hooks", "mail")], "leaves no queue"),
    ],
    ids=["unknown", "unknown-excluded", "unknown-both", "none-of-one", "none-of-all"],
)
@cases("how", [[], ["--once"], ["--reload"]], ids=["", "once", "reload"])
def test_what_cannot_be_served_is_refused(
    given: dict[str, Any], arguments: list[str], says: str, how: list[str]
) -> None:
    with pytest.raises(CommandError, match=says):
        call_command("outbox_worker", *how, *arguments)
    assert given == {}
