"""The outbox on one of several databases: commands, routers, checks."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import transaction

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests import samples
from tests.conformance.test_databases_apart import (
    ALIASES,
    Witness,
    adds_effect,
    done,
    statuses,
    write,
)
from tests.table import PLACED, listening
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True, databases=ALIASES)


def test_max_events_of_once_holds_for_all_databases_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for alias in ALIASES:
        write(alias, 3)
    once = ["outbox_worker", "--once", "--database", "other", "--database", "default"]
    with listening(Witness()):
        call_command(*once, "--max-events", "4")
        assert "delivered 4" in capsys.readouterr().out
        assert (statuses("other"), statuses("default")) == ({"DONE": 3}, {"DONE": 1, "NEW": 2})
        call_command(*once, "--max-events", "4")
    assert "delivered 2" in capsys.readouterr().out
    done(3)


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


def test_x7_the_check_says_where_what_is_and_what_to_do(settings: Any) -> None:
    routed(settings, NoTableElsewhere)
    (error,) = run_checks(tags=["django_outbox"])
    assert "The outbox is written on 'other', but the project's models on ['default']" in error.msg
    assert "Route django_outbox to where the business rows are" in str(error.hint)


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
    with samples.run("how-to/use-several-databases.md", Order=Order) as names:
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
