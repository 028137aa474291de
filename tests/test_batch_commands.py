"""``outbox_replay`` and ``outbox_purge``: filters, batches, and what remains after an interrupt."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.db import OperationalError, connection, transaction

from django_outbox.listeners.outcomes import Status
from django_outbox.listeners.queues import receipt_of
from django_outbox.management import arguments
from django_outbox.models import OutboxEvent, OutboxInbox, OutboxQuerySet, OutboxStream, deliver_to
from django_outbox.sql import dialect_of
from tests.cases import cases
from tests.samples import DOCS
from tests.surroundings import printed
from tests.table import dead, insert, keyed, listening, now, row, statuses

pytestmark = pytest.mark.django_db(transaction=True)

DONE, DEAD, RETRY = Status.DONE, Status.DEAD, Status.RETRY
ROOT = DOCS.parent
replay, purge = partial(printed, "outbox_replay"), partial(printed, "outbox_purge")


def left() -> set[str]:
    """Return the ids of events that are still dead."""
    return {*OutboxEvent.objects.dead().values_list("pk", flat=True)}


# -- replay ----------------------------------------------------------------------------------------


def test_44_465_events_are_replayed_by_id() -> None:
    first, second, third = dead(3)
    assert replay(first, third) == "replayed 2"
    assert left() == {second}
    found = row(first)
    assert (found.status, found.attempts, found.last_error, found.done_at) == (0, 0, None, None)
    assert found.available_at is not None
    assert found.available_at <= now()


def test_j21_only_dead_events_are_replayed() -> None:
    (done,) = insert(1, due=None, status=DONE, done_at=now())
    (waits,) = insert(1, due=600, status=RETRY, attempts=2)
    (gone,) = dead(1)
    said = replay(done, waits, gone, "nowhere")
    assert said == "replayed 1; 3 of the given ids are unknown or not dead"
    assert row(done).status == DONE
    assert (row(waits).status, row(waits).attempts) == (RETRY, 2)
    assert replay("--all") == "replayed 0"
    for ids in ([done], ["nowhere", waits]):
        with pytest.raises(CommandError, match=rf"^replayed 0; {len(ids)} of the given ids"):
            replay(*ids, "--limit", "5")


FILTERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "event type": (("--event-type", "b"), {"event_type": "b"}),
    "aggregate type": (("--aggregate-type", "shop.Cart"), {"aggregate_type": "shop.Cart"}),
    "aggregate id": (("--aggregate-id", "7"), {"aggregate_id": "7"}),
    "tenant": (("--tenant", "north"), {"tenant_id": "north"}),
    "error": (("--error", "KeyError"), {"last_error": "KeyError: 'x'\nTraceback"}),
    "since": (("--since", "30s"), {"ago": 5}),
    "until": (("--until", "1h"), {"ago": 7200}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_j21_465_a_filter_chooses(name: str) -> None:
    given, columns = FILTERS[name]
    others = dead(3, event_type="a", ago=60)
    wanted = dead(2, **{"event_type": "a", "ago": 60, **columns})
    assert replay(*given, "--dry-run") == "would replay 2"
    assert replay(*given) == "replayed 2"
    assert left() == {*others}
    assert all(row(each).status == Status.NEW for each in wanted)


def test_a_filter_by_key_wakes_the_stream() -> None:
    keyed("k", 2, status=DEAD, done_at=now() - timedelta(seconds=9))
    keyed("other", 1, status=DEAD, done_at=now() - timedelta(seconds=9))
    OutboxStream.objects.update(due_at=None)
    assert replay("--key", "k") == "replayed 2"
    due = dict(OutboxStream.objects.values_list("key", "due_at"))
    assert due["k"] is not None
    assert due["other"] is None


def test_all_filters_must_fit_and_types_may_be_many() -> None:
    dead(1, event_type="a", tenant_id="north")
    dead(1, event_type="b", tenant_id="north")
    dead(1, event_type="c", tenant_id="north")
    dead(1, event_type="a", tenant_id="south")
    assert replay("--event-type", "a", "--event-type", "b", "--tenant", "north") == "replayed 2"


def test_without_a_choice_nothing_is_replayed() -> None:
    """To replay every dead event, ``--all`` must be given."""
    dead(1)
    with pytest.raises(CommandError, match="Expected ids, a filter, or --all"):
        replay()
    with pytest.raises(CommandError, match="Expected ids, a filter, or --all"):
        replay("--limit", "5")
    with pytest.raises(CommandError, match="--all cannot be combined"):
        replay("--all", "--event-type", "a")
    assert len(left()) == 1
    assert replay("--all") == "replayed 1"


@cases("text", ["\udcff", "a\0b"])
def test_text_that_no_database_takes_is_refused(text: str) -> None:
    for given in ([text], ["--error", text], ["--event-type", text]):
        with pytest.raises(CommandError, match="is not text in UTF-8 without NUL"):
            replay(*given)


def test_j21_465_more_than_a_batch_is_replayed_batch_by_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead(25)
    sizes: list[int] = []
    replay_dead = OutboxQuerySet.replay

    def note(rows: OutboxQuerySet, **options: Any) -> int:
        assert not transaction.get_connection().in_atomic_block  # each batch commits on its own
        sizes.append(replay_dead(rows, **options))
        return sizes[-1]

    monkeypatch.setattr(OutboxQuerySet, "replay", note)
    monkeypatch.setattr(arguments, "BATCH_SIZE", 10)
    assert replay("--all") == "replayed 25"
    assert sizes == [10, 10, 5]


@pytest.mark.parametrize(("limit", "batch"), [(7, 3), (3, 10), (6, 3), (99, 4)])
def test_44_a_limit_is_kept(monkeypatch: pytest.MonkeyPatch, limit: int, batch: int) -> None:
    ids, count = dead(10), min(limit, 10)
    monkeypatch.setattr(arguments, "BATCH_SIZE", batch)
    assert replay("--all", "--limit", str(limit), "--dry-run") == f"would replay {count}"
    assert replay("--all", "--limit", str(limit)) == f"replayed {count}"
    assert left() == {*ids[count:]}


def test_465_it_ends_though_what_is_replayed_dies_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends even if a listener fails every replayed event between two batches."""
    dead(30)
    deaths: list[int] = []
    replay_dead = OutboxQuerySet.replay

    def replay_and_die(rows: OutboxQuerySet, **options: Any) -> int:
        count = replay_dead(rows, **options)
        rows.update(status=DEAD, done_at=now(), available_at=None)
        deaths.append(count)
        return count

    monkeypatch.setattr(OutboxQuerySet, "replay", replay_and_die)
    monkeypatch.setattr(arguments, "BATCH_SIZE", 7)
    assert replay("--all") == "replayed 30"
    assert sum(deaths) == 30
    assert statuses() == {"DEAD": 30}


@pytest.mark.parametrize(
    "chosen", [("--all",), ("--error", "ValueError", "--since", "2h")], ids=["all", "some"]
)
def test_465_an_interruption_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, ...]
) -> None:
    """The message gives the options that resume the replay."""
    ids = dead(10)
    replay_dead, calls = OutboxQuerySet.replay, iter([True, True, False])

    def replay_twice(rows: OutboxQuerySet, **options: Any) -> int:
        if not next(calls):
            raise KeyboardInterrupt
        return replay_dead(rows, **options)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(OutboxQuerySet, "replay", replay_twice)
        interrupted.setattr(arguments, "BATCH_SIZE", 3)
        with pytest.raises(CommandError) as raised:
            replay(*chosen)
    assert raised.value.returncode == 130
    found = re.fullmatch(
        r"replayed 6, interrupted\. To continue, repeat the command(, without --all,)? with (--.*)",
        str(raised.value),
    )
    assert found
    assert bool(found[1]) == ("--all" in chosen)
    assert ("--since 2" in found[2]) == ("--since" in chosen)  # an instant: 2h ago is later now
    filters = () if found[1] else chosen

    OutboxEvent.objects.filter(pk__in=ids[:2]).update(status=DEAD, done_at=now())  # died again
    (late,) = dead(1, ago=-1)  # died after the interrupt
    assert replay(*filters, *shlex.split(found[2])) == "replayed 4"
    assert left() == {*ids[:2], late}


# -- purge -----------------------------------------------------------------------------------------


def said(events: int = 0, messages: int = 0, *, verb: str = "purged") -> str:
    return f"{verb} events: {events}, idle streams: 0, received messages: {messages}"


def done(count: int, *, ago: float, **columns: Any) -> list[str]:
    at = now() - timedelta(seconds=ago)
    return insert(count, due=None, status=DONE, done_at=at, **columns)


def test_43_an_age_stands_for_the_retention() -> None:
    """The age that is given replaces the retention for that kind only."""
    done(3, ago=7200)
    done(2, ago=60)
    dead(4, ago=7200)
    at = now() - timedelta(hours=2)
    OutboxInbox.objects.bulk_create(
        OutboxInbox(source="bank", message_id=str(n), received_at=at) for n in range(5)
    )
    assert purge("--dry-run") == said(verb="would purge")
    assert purge("--dry-run", "--done-older-than", "1h") == said(3, verb="would purge")
    assert purge("--done-older-than", "1h") == said(3)
    assert statuses() == {"DONE": 2, "DEAD": 4}
    assert purge("--dead-older-than", "90m", "--inbox-older-than", "1h30m") == said(4, 5)
    assert statuses() == {"DONE": 2}
    assert purge("--done-older-than", "0") == said(2)


def test_a_kept_unique_key_is_kept() -> None:
    """The age of events does not shorten how long duplicates are recognized."""
    done(1, ago=7200, unique_key="once")
    assert purge("--done-older-than", "1h") == said(0)


def test_an_interrupted_purge_says_what_is_done(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.OUTBOX = {"PURGE_BATCH_SIZE": 3}
    done(10, ago=30 * 86_400)
    delete, calls = OutboxQuerySet._delete_unlocked, iter([True, True, False])

    def twice(rows: OutboxQuerySet) -> int:
        if not next(calls):
            raise KeyboardInterrupt
        return delete(rows)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(OutboxQuerySet, "_delete_unlocked", twice)
        with pytest.raises(CommandError, match=r"purged events: 6, .* interrupted") as raised:
            purge()
    assert raised.value.returncode == 130
    assert purge() == said(4)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_several_databases_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    done(2, ago=30 * 86_400)
    both = ("--database", "default", "--database", "other")
    assert purge(*both).splitlines() == [f"[default] {said(2)}", f"[other] {said(0)}"]
    purge_batches = OutboxQuerySet.purge_batches

    def down(rows: OutboxQuerySet, *given: Any) -> Any:
        if rows.db == "default":
            raise OperationalError("connection refused")
        return purge_batches(rows, *given)

    monkeypatch.setattr(OutboxQuerySet, "purge_batches", down)
    out = io.StringIO()
    with pytest.raises(CommandError, match=r"^default: connection refused$"):
        call_command("outbox_purge", *both, stdout=out)
    assert out.getvalue().strip() == f"[other] {said(0)}"


# -- shells ----------------------------------------------------------------------------------------


def shell(line: str, env: dict[str, str]) -> Any:
    command = ["sh", "-c", f"exec {sys.executable} -m django {line}"]
    return subprocess.run(command, env=env, cwd=ROOT, check=False, capture_output=True)


def test_a_pipe_that_ends_early_and_a_terminal_with_ascii_only(
    database_env: dict[str, str],
) -> None:
    """``outbox_dead export | head -1`` ends quietly; what ASCII lacks is escaped as in JSON."""
    dead(2000, last_error="ValueError: ü" * 50, cause="ü😀", listener="ü😀")
    env = {**database_env, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "django", "outbox_dead"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "export", "--all"], env=env, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert json.loads(line)["listener"] == "ü😀"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 141
    assert rb"\u00fc\ud83d\ude00" in shell("outbox_dead list", env).stdout
    [cause] = json.loads(shell("outbox_dead list --format json", env).stdout)
    assert cause["listeners"] == ["ü😀"]


@pytest.mark.parametrize("line", ["worker --once", "status", "dead list"])
def test_no_command_needs_an_open_stream(line: str, database_env: dict[str, str]) -> None:
    assert shell(f"outbox_{line} <&- >&- 2>&-", database_env).returncode == 0


def test_no_command_has_every_database_asked_by_its_checks() -> None:
    """Django 6.1 queries every MySQL server before a command that does not limit its checks."""
    names = [name for name, app in get_commands().items() if app == "django_outbox"]
    assert len(names) == 6
    for name in names:
        assert load_command_class("django_outbox", name).get_check_kwargs({}) == {"databases": []}


# -- a new listener --------------------------------------------------------------------------------

LEDGER = "order.* ledger"


@pytest.fixture
def ledger() -> Iterator[None]:
    with listening(lambda event: None, event_type="order.*", name="ledger"):
        yield


def stored(**columns: Any) -> str:
    given = {"listener": "order.placed", "routes": "x" * 12, "status": DONE, **columns}
    return insert(1, due=None, done_at=now(), **given)[0]


def given_to_ledger() -> set[str]:
    return {*OutboxEvent.objects.filter(listener=LEDGER).values_list("event_id", flat=True)}


def test_a_new_listener_is_given_what_occurred_in_a_time(ledger: None) -> None:
    hours = {n: now() - timedelta(hours=n) for n in range(1, 5)}
    ids = {n: stored(occurred_at=each) for n, each in hours.items()}
    stored(event_type="cart.filled", occurred_at=hours[2])
    given = ("--listener", LEDGER, "--since", "3h30m", "--until", hours[1].isoformat())
    assert replay(*given, "--dry-run") == "would replay 0, would insert 2"
    assert given_to_ledger() == set()
    assert replay(*given) == "replayed 0, inserted 2"
    assert given_to_ledger() == {ids[2], ids[3]}
    assert replay("--listener", LEDGER) == "replayed 0, inserted 2"
    assert given_to_ledger() == {*ids.values()}


def test_a_listener_is_given_what_it_lacks_and_again_what_is_dead_and_others_nothing(
    ledger: None,
) -> None:
    (mine,), (other,) = dead(listener=LEDGER, routes="y" * 12), dead(listener="order.placed")
    lacked = stored()
    OutboxEvent.objects.filter(pk=mine).update(routes=receipt_of("", "order.placed"))
    assert replay("--listener", LEDGER) == "replayed 1, inserted 2"
    assert given_to_ledger() == {mine, other, lacked}
    assert OutboxEvent.objects.get(pk=other).status == DEAD


def test_a_new_listener_is_given_events_slowly(ledger: None) -> None:
    stored(tenant_id="north")
    stored()
    said = replay("--listener", LEDGER, "--tenant", "north", "--rate", "1/m")
    due = OutboxEvent.objects.get(listener=LEDGER).available_at
    assert due is not None
    assert said == f"replayed 0, inserted 1; the last is due at {due.isoformat(' ', 'seconds')}"


@pytest.mark.parametrize(
    "alone", [("--error", "KeyError"), ("--limit", "5"), ("--cause", "0" * 16)], ids=str
)
def test_what_only_dead_events_have_gives_a_listener_no_others(
    ledger: None, alone: tuple[str, ...]
) -> None:
    stored()
    assert replay("--listener", LEDGER, *alone) == "replayed 0"
    assert given_to_ledger() == set()


def test_an_unknown_listener_is_refused_and_the_nearest_named(ledger: None) -> None:
    with pytest.raises(CommandError, match=re.escape(LEDGER)):
        replay("--listener", "order.*:ledger")


def test_the_dead_deliveries_of_a_removed_listener_are_replayed() -> None:
    dead(listener="order.placed gone")
    assert replay("--listener", "order.placed gone") == "replayed 1"


def test_a_time_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(CommandError, match="--until"):
        replay("--since", "1h", "--until", "2h")


def test_what_an_interrupt_leaves_is_given_by_the_same_command(
    ledger: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver_to, "PART", 2)
    for _ in range(5):
        stored()
    dialect, parts = type(dialect_of(connection)), iter([1])
    lock_rows = dialect.lock_rows

    def interrupted(*args: Any) -> Any:
        if next(parts, None) is None:
            raise KeyboardInterrupt
        return lock_rows(*args)

    monkeypatch.setattr(dialect, "lock_rows", interrupted)
    with pytest.raises(CommandError, match="inserted 2, interrupted") as raised:
        replay("--listener", LEDGER)
    assert raised.value.returncode == 130
    monkeypatch.undo()
    assert replay("--listener", LEDGER) == "replayed 0, inserted 3"
