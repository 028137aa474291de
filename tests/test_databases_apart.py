"""The outbox on one of several databases: commands, routers, checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import transaction

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from django_outbox.writing.on_commit import hot_queues
from tests import samples
from tests.fleet import Fleet
from tests.table import PLACED, listening
from tests.test_hot import at_rest
from tests.testapp.models import Effect, Order
from tests.waiting import wait_until

ALIASES = ["default", "other"]
pytestmark = pytest.mark.django_db(transaction=True, databases=ALIASES)


def test_74_commands_take_a_database(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0.001}
    for alias in ALIASES:
        write(alias, 2)
    with listening(Witness()):
        call_command("outbox_worker", "--once", "--database", "other")
    assert "delivered 2" in capsys.readouterr().out
    assert (statuses("default"), statuses("other")) == ({"NEW": 2}, {"DONE": 2})
    OutboxEvent.objects.using("default").update(
        status=Status.DONE,
        done_at=OutboxEvent.objects.using("other").first().done_at,  # type: ignore[union-attr]
    )
    call_command("outbox_purge", "--database", "other")
    assert "purged events: 2" in capsys.readouterr().out
    assert (statuses("default"), statuses("other")) == ({"DONE": 2}, {})


# -- routers ---------------------------------------------------------------------------------------


class ToOther:
    """Route everything that is not Django's own to the other database."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return self.db_for_write(model)

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label in ("testapp", "django_outbox") else None


class BusinessToOther(ToOther):
    """Route the business models, but not the outbox."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "testapp" else None


class OutboxToOther(ToOther):
    """Route only the outbox to the other database."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "django_outbox" else None


class NoTableBesideBusiness(BusinessToOther):
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db == "default" if app_label == "django_outbox" else None


class NoTableElsewhere(OutboxToOther):
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db == "other" if app_label == "django_outbox" else None


def routed(settings: Any, router: type) -> None:
    settings.DATABASE_ROUTERS = [f"{__name__}.{router.__name__}"]


def test_what_is_not_named_goes_where_the_router_says(
    settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.OUTBOX = {"RETENTION_DONE": 0.001}
    routed(settings, ToOther)
    with transaction.atomic(using="other"):
        outbox.write(PLACED, {"at": "other"})
        outbox.write_many([outbox.Event(event_type=PLACED, payload={"at": "other"})])
    assert statuses("other") == {"NEW": 2}
    witness = Witness()
    with listening(witness):
        assert outbox.drain(limit=1) == 1
        call_command("outbox_worker", "--once")
        with outbox.Worker(purge=False) as worker:
            assert worker.alias == "other"
            write("other")
            done(3, "other")
    assert {each[1] for each in witness.seen} == {"other"}
    call_command("outbox_purge")
    assert "purged events: 3" in capsys.readouterr().out
    assert not OutboxEvent.objects.using("default").exists()


def test_x7_a_write_apart_from_its_business_transaction_names_the_right_one(settings: Any) -> None:
    routed(settings, BusinessToOther)
    with pytest.raises(outbox.NoActiveTransaction) as caught, transaction.atomic(using="other"):
        Order.objects.create(sku="B-7")
        outbox.write(PLACED)
    text = str(caught.value)
    assert "outside a transaction on 'default'" in text
    assert "active on ['other']; did you mean using=" in text
    assert not Order.objects.using("other").exists()
    assert not OutboxEvent.objects.exists()


def routing_checks() -> list[tuple[str | None, bool]]:
    found = run_checks(tags=["django_outbox"])
    return [(each.id, each.is_serious()) for each in found if "django_outbox" in str(each.id)]


@pytest.mark.parametrize(
    ("router", "found"),
    [
        (None, []),
        (ToOther, []),
        (OutboxToOther, [("django_outbox.W041", False)]),
        (NoTableElsewhere, [("django_outbox.E040", True)]),
        (BusinessToOther, [("django_outbox.W041", False)]),
        (NoTableBesideBusiness, [("django_outbox.W041", False)]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_x7_an_outbox_apart_from_the_business_rows_is_refused_or_named(
    settings: Any, router: type | None, found: list[Any]
) -> None:
    if router is not None:
        routed(settings, router)
    assert routing_checks() == found


@pytest.mark.parametrize(
    ("router", "atomic", "found"),
    [
        (NoTableBesideBusiness, True, True),
        (NoTableBesideBusiness, False, False),
        (BusinessToOther, True, False),  # the other database has the tables, so it may be served
        (ToOther, True, False),
    ],
    ids=["apart", "plain", "tables", "together"],
)
def test_an_atomic_listener_of_another_database_is_refused(
    settings: Any, router: type, atomic: bool, found: bool
) -> None:
    routed(settings, router)
    with listening(adds_effect, atomic=atomic):
        errors = [each for each in run_checks(tags=["django_outbox"]) if "E042" in str(each.id)]
    assert len(errors) == found
    if found:
        assert "are written on ['other'], where the outbox has no table" in errors[0].msg
        assert errors[0].is_serious()


# -- the documentation -----------------------------------------------------------------------------


def test_the_samples_of_the_how_to(settings: Any) -> None:
    """The how-to's router recipe works as written."""
    settings.OUTBOX = {}
    with samples.run("reference/databases.md#Use several databases", Order=Order) as names:
        router = names["ShopRouter"]()
        router.alias, router.apps = "other", {"testapp", "django_outbox"}
        settings.DATABASE_ROUTERS = [router]
        assert routing_checks() == []
        names["place"]("B-7")
        assert (statuses("other"), statuses("default")) == ({"NEW": 1}, {})
        assert outbox.drain() == 1
        with transaction.atomic(using="default"):
            outbox.write("invoice.due", {"sku": "C-1"}, using="default")
        assert outbox.drain(using="default") == 1
    assert Order.objects.using("other").count() == 1
    for alias in ALIASES:
        assert statuses(alias) == {"DONE": 1, "NEW": 1}
        confirmed = OutboxEvent.objects.using(alias).get(status=Status.NEW)
        assert confirmed.event_type == "order.confirmed"


FAR = {"POLL_INTERVAL": 3600, "PROBE_INTERVAL": 3600, "DOORBELL": None}


def write(alias: str, count: int = 1, event_type: str = PLACED, **fields: Any) -> list[str]:
    with transaction.atomic(using=alias):
        return outbox.write_many(
            [
                outbox.Event(event_type=event_type, **{"payload": {"at": alias, "n": n}, **fields})
                for n in range(count)
            ],
            using=alias,
        )


def statuses(alias: str) -> dict[str, int]:
    counts = OutboxEvent.objects.using(alias).counts_by_status()
    return {name: count for name, count in counts.items() if count}


def done(count: int, *aliases: str) -> None:
    for alias in aliases or ALIASES:
        wait_until(
            lambda alias=alias: statuses(alias) == {"DONE": count}, within=60, what=f"{alias} DONE"
        )


class Witness:
    """A listener that notes each event's database and route (hot or cold)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []  # event id, database, source

    def __call__(self, event: outbox.Event) -> None:
        assert event.payload["at"] == event.database
        self.seen.append((event.event_id, event.database, event.source))


def test_49_the_hot_queue_of_one_is_not_that_of_the_other(settings: Any) -> None:
    """An event is delivered only by a worker of the database it was written to."""
    settings.OUTBOX = FAR
    witness = Witness()
    with listening(witness):
        with outbox.Worker(using="other") as worker:
            assert [*hot_queues.by_alias] == ["other"]
            at_rest(worker)
            write("default", 3)
            write("other", 3)
            done(3, "other")
            assert statuses("default") == {"NEW": 3}
        assert {each[1:] for each in witness.seen} == {("other", "hot")}
        with outbox.Worker(using="default"):
            done(3, "default")


def test_the_aliases_of_a_process_stop_at_the_same_time(
    database_env: dict[str, str], tmp_path: Path
) -> None:
    """While one alias waits for a slow listener, the other must not go on claiming."""
    fleet = Fleet(database_env, tmp_path, DRAIN_TIMEOUT=20)
    try:
        (process,) = {*[fleet.start("--database", "default", "--database", "other")]}
        write("default", payload={"seconds": 3})
        wait_until(fleet.starts, what="the slow one's start")
        process.terminate()
        while process.poll() is None:
            write("other", payload={})
        assert process.wait(30) == 0
    finally:
        fleet.kill_all()
    assert statuses("default") == {"DONE": 1}
    after = statuses("other")
    assert after["NEW"] > after.get("DONE", 0)  # it stopped claiming at once


def test_74_writing_and_draining_take_a_database(settings: Any) -> None:
    settings.OUTBOX = {}
    witness = Witness()
    with transaction.atomic(using="other"):
        one = outbox.write(PLACED, {"at": "other"}, using="other")
        many = outbox.write_many(
            [outbox.Event(event_type=PLACED, payload={"at": "other"})], using="other"
        )
    write("default")
    with listening(witness):
        assert outbox.drain(using="other") == 2
        assert statuses("default") == {"NEW": 1}
        assert outbox.drain() == 1
    assert [each[0] for each in witness.seen[:2]] == [one, *many]
    assert [each[1] for each in witness.seen] == ["other", "other", "default"]


def adds_effect(event: outbox.Event) -> None:
    Effect.objects.create(event_id=event.event_id, pid=0, phase="end")


adds_effect.__module__ = "tests.testapp.listeners"


# Both databases have streams of the same keys.
def test_g13_streams_of_one_name_keep_apart_and_in_order(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 4, "MODE": "ordered", "UNROUTABLE_GRACE": 0}
    witness = Witness()

    def stumble(event: outbox.Event) -> None:
        if event.payload["n"] == 0 and event.attempts == 0:
            raise ConnectionError
        witness(event)

    with (
        listening(stumble, retry=outbox.Fixed(0.01)),
        outbox.Worker(using="default"),
        outbox.Worker(using="other"),
    ):
        ids = {(n, alias): [] for n in range(3) for alias in ALIASES}  # type: Any
        for _ in range(4):
            for n, alias in ids:
                ids[n, alias] += write(alias, 2, aggregate_id=str(n))
        done(24)
    for (_, alias), stream in ids.items():
        order = [event_id for event_id, database, _ in witness.seen if database == alias]
        assert [each for each in order if each in stream] == stream
