"""System checks: id, message and hint (rows 186, 194, 408, 495; J24). Listeners: test_registry."""

from __future__ import annotations

import smtplib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import send_mail
from django.db import connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.utils import ConnectionHandler
from django.test import override_settings

from django_outbox import Event, Fixed, hooks
from django_outbox import models as outbox_models
from django_outbox.checks import databases, deploying, pooling
from django_outbox.events import decode, encode
from tests.table import listening


class Text:
    """A serializer of somebody else's."""

    dumps = staticmethod(encode)
    loads = staticmethod(decode)


class Half:
    dumps = staticmethod(encode)


class Nowhere:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "django_outbox" else None


def ours(databases: list[str] | None = None) -> list[CheckMessage]:
    # Not all checks: those of models ask a MySQL server, which most tests here have no leave to.
    tags = ["django_outbox", *(["database"] if databases else [])]
    return [each for each in run_checks(tags=tags, databases=databases)
            if each.id and each.id.startswith("django_outbox")]  # fmt: skip


def deployed() -> list[CheckMessage]:
    """What ``check --deploy`` says beside the rest."""
    found = run_checks(tags=["django_outbox"], include_deployment_checks=True)
    usual = {each.id for each in ours()}
    return [each for each in found if each.id not in usual]


def ids(databases: list[str] | None = None) -> list[str | None]:
    return [each.id for each in ours(databases)]


@pytest.mark.django_db(databases=["default", "other"])
def test_a_sound_project_hears_nothing() -> None:
    """Row 194."""
    assert ours([*connections]) == []


@pytest.mark.django_db(databases=["default", "other"])
def test_no_database_is_warned_of_conditional_indexes() -> None:
    """Row +7: W037 on MariaDB."""
    found = run_checks(databases=[*connections])
    assert [each for each in found if "django_outbox" in str(each.obj)] == []
    assert "models.W037" not in {each.id for each in found}


@pytest.mark.parametrize(
    ("outbox", "message", "hint"),
    [
        ({"LEESE": 1}, "OUTBOX['LEESE'] is not a setting.", 'Did you mean "LEASE"?'),
        ({"WORKERS": 0}, 'OUTBOX["WORKERS"] is 0; expected', 'Correct OUTBOX["WORKERS"]'),
        ({"TABLE_PREFIX": "a-b"}, "OUTBOX[\"TABLE_PREFIX\"] is 'a-b'; expected", "leave it out"),
        ({"SCHEMA": 'x"'}, 'OUTBOX["SCHEMA"] is', "leave it out"),
        (5, "OUTBOX is 5; expected a dict.", "Write OUTBOX ="),
    ],
    ids=str,
)
def test_e001_an_unknown_or_unfit_setting(outbox: Any, message: str, hint: str) -> None:
    """Rows 186, 408, 452, J24."""
    with override_settings(OUTBOX=outbox):
        [error] = ours()
    assert (error.id, error.is_serious()) == ("django_outbox.E001", True)
    assert message in error.msg
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    "outbox",
    [{"RETRY": "nonsense"}, {"RETRY": {"policy": "nonsense"}}, {"RETRY": {"base": -1}},
     {"RETRY": 5}, {"SERIALIZER": "nonsense.x"}, {"SERIALIZER": "tests.test_checks.Half"},
     {"SERIALIZER": 5}],
    ids=str,
)  # fmt: skip
def test_e002_a_path_that_leads_to_nothing_usable(outbox: dict[str, Any]) -> None:
    """Row 408, J24."""
    with override_settings(OUTBOX=outbox):
        [error] = ours()
    assert (error.id, error.is_serious()) == ("django_outbox.E002", True)
    assert f'OUTBOX["{next(iter(outbox))}"]' in error.msg


class Useless:
    """A class with nothing that a writer would call."""


class Needy:
    def __init__(self, client: object) -> None:
        """Nobody gives it one."""

    def after_commit(self, events: list[Event]) -> None:
        """Never called."""


class Awaited:
    async def after_commit(self, events: list[Event]) -> None:
        """Never awaited."""


async def awaited_context() -> dict[str, str]:
    return {}


WRONG_PATHS: dict[str, tuple[str, str, str]] = {
    "no module": ("WRITER_HOOKS", "nonsense.Hook", "cannot be imported"),
    "no attribute": ("WRITER_HOOKS", "tests.test_checks.Nonsense", "cannot be imported"),
    "no class": ("WRITER_HOOKS", "tests.test_checks.ours", "expected a class"),
    "an instance": ("WRITER_HOOKS", "tests.test_checks.WRONG_PATHS", "expected a class"),
    "no method": ("WRITER_HOOKS", "tests.test_checks.Useless", "none of the methods before_write"),
    "arguments": ("WRITER_HOOKS", "tests.test_checks.Needy", "made without arguments"),
    "async method": ("WRITER_HOOKS", "tests.test_checks.Awaited", "no ordinary method"),
    "no provider": ("CONTEXT_PROVIDERS", "nonsense.provider", "cannot be imported"),
    "not callable": ("CONTEXT_PROVIDERS", "tests.test_checks.WRONG_PATHS", "ordinary function"),
    "async provider": (
        "CONTEXT_PROVIDERS", "tests.test_checks.awaited_context", "ordinary function"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PATHS)
def test_e002_a_path_of_a_list_that_leads_to_nothing_usable(name: str) -> None:
    """Rows 37, 408, J24: what would fail with the first write."""
    setting, path, says = WRONG_PATHS[name]
    with override_settings(OUTBOX={setting: [path]}):
        [error] = ours()
        with pytest.raises(ImproperlyConfigured, match=says):
            _ = hooks.writer_hooks(), hooks.context()
    assert (error.id, error.is_serious()) == ("django_outbox.E002", True)
    assert f'OUTBOX["{setting}"] names {path!r}' in error.msg
    assert says in error.msg


def test_a_serializer_is_found_by_its_path() -> None:
    with override_settings(OUTBOX={"SERIALIZER": "tests.test_checks.Text"}):
        assert hooks.serializer() is not hooks.JSON
        assert ours() == []
    assert hooks.serializer() is hooks.JSON


@pytest.mark.parametrize(
    ("outbox", "found"),
    [({"DRAIN_TIMEOUT": 30}, ["django_outbox.E003"]), ({"LEASE": 5}, ["django_outbox.E003"]),
     ({"LEASE": 5.1}, []), ({"DRAIN_TIMEOUT": 29}, [])],
    ids=str,
)  # fmt: skip
def test_e003_a_worker_must_end_before_its_leases(outbox: dict[str, Any], found: list[str]) -> None:
    with override_settings(OUTBOX=outbox):
        assert ids() == found


def test_ordered_delivery_needs_no_further_setting_and_hears_nothing() -> None:
    """Row 406."""
    with override_settings(OUTBOX={"MODE": "ordered", "ON_DEAD": "block"}):
        assert ours() == []


@pytest.mark.parametrize(
    ("change", "refused"),
    [({}, True), ({"UNROUTABLE_GRACE": 0}, False), ({"UNROUTABLE": "ignore"}, False),
     ({"ORDERING": "aggregate"}, False), ({"MODE": "multi_node"}, False)],
    ids=str,
)  # fmt: skip
def test_e003_one_stream_waits_for_no_listener(change: dict[str, Any], refused: bool) -> None:
    """Design 5: an unroutable event would hold up everything for the grace."""
    with override_settings(OUTBOX={"MODE": "ordered", "ORDERING": "global", **change}):
        found = [each for each in ours() if each.id == "django_outbox.E003"]
    assert bool(found) == refused
    assert all("UNROUTABLE_GRACE" in (each.hint or "") for each in found)


@pytest.fixture
def strict(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[str | None]:
    """Make the database's connection REPEATABLE READ; return what the check should say of it."""
    plain = connections["default"]
    strict = plain.copy()
    options = {**strict.settings_dict["OPTIONS"]}
    if plain.vendor == "postgresql":
        options["isolation_level"] = 3  # psycopg's REPEATABLE READ
    elif plain.vendor == "mysql":
        options |= {
            "isolation_level": "repeatable read",
            "init_command": "SET SESSION innodb_snapshot_isolation = ON",
        }
    strict.settings_dict["OPTIONS"] = options
    connections["default"] = strict
    yield None if plain.vendor == "sqlite" else "REPEATABLE READ"
    strict.close()
    connections["default"] = plain


def strictness() -> list[str]:
    return [each.msg for each in ours(["default"]) if each.id == "django_outbox.W026"]


@override_settings(OUTBOX={"MODE": "ordered"})
def test_w026_transactions_in_which_a_second_writer_of_a_key_fails(strict: str | None) -> None:
    """R9 of the races of ordered delivery."""
    found = strictness()
    assert len(found) == (strict is not None)
    assert all(f"are {strict}." in text for text in found)


def test_w026_is_for_those_whose_every_event_has_a_key(strict: str | None) -> None:
    assert strictness() == []


@pytest.mark.django_db
@override_settings(OUTBOX={"MODE": "ordered"})
def test_w026_is_not_for_read_committed() -> None:
    assert strictness() == []


@pytest.mark.parametrize(("embedded", "found"), [(True, ["django_outbox.W030"]), (False, [])])
def test_w030_embedded_workers_need_traffic(embedded: bool, found: list[str]) -> None:
    with override_settings(OUTBOX={"EMBEDDED": embedded}):
        assert [each.id for each in ours() if not each.is_serious()] == found


# --- databases: a SQLite of our own, whatever this run uses ---------------------------------------


@pytest.fixture
def sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any) -> Any:
    """Return a function that makes the checks see one SQLite file with these OPTIONS."""
    made: list[ConnectionHandler] = []

    def use(**options: str) -> Any:
        settings = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(tmp_path / "check.sqlite3"),
            "OPTIONS": options,
        }
        handler = ConnectionHandler({"default": settings})
        made.append(handler)
        for room in (databases, deploying, pooling):
            monkeypatch.setattr(room, "connections", handler)
        monkeypatch.setattr(outbox_models, "connections", handler)
        monkeypatch.setattr(transaction, "connections", handler)  # for the schema editor
        return handler["default"]

    with django_db_blocker.unblock():
        yield use
    for handler in made:
        handler.close_all()


WAL = "PRAGMA journal_mode=WAL"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ["django_outbox.W020"]),
        ({"transaction_mode": "DEFERRED"}, ["django_outbox.W020"]),
        ({"transaction_mode": "immediate"}, []),
        ({"transaction_mode": "EXCLUSIVE"}, []),
    ],
    ids=str,
)
def test_w020_sqlite_that_begins_deferred(
    sqlite: Any, options: dict[str, str], found: list[str]
) -> None:
    """E3: 43 % of the business transactions failed."""
    connection = sqlite(**options)
    messages = [each for each in ours() if each.id == "django_outbox.W020"]

    assert [each.id for each in messages] == found
    assert all('"transaction_mode": "IMMEDIATE"' in (each.hint or "") for each in messages)
    assert connection.connection is None  # needs no database


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"init_command": WAL}, False)])
def test_w021_sqlite_without_write_ahead_log(
    sqlite: Any, options: dict[str, str], warned: bool
) -> None:
    """E3."""
    sqlite(transaction_mode="IMMEDIATE", **options)
    found = databases.check_databases(None, databases=["default"])
    assert [each.id for each in found] == ["django_outbox.W021"] * warned
    assert all("journal_mode=WAL" in (each.hint or "") for each in found)


def test_databases_that_were_not_asked_for_are_not_looked_at(sqlite: Any) -> None:
    connection = sqlite()
    assert databases.check_databases(None, databases=None) == []
    assert databases.check_databases(None, databases=["other"]) == []
    assert connection.connection is None


@override_settings(DATABASE_ROUTERS=[Nowhere()])
def test_databases_without_our_tables_are_not_looked_at(sqlite: Any) -> None:
    sqlite()
    assert ids() == []
    assert databases.check_databases(None, databases=["default"]) == []


@override_settings(OUTBOX={"SCHEMA": "my"})
def test_e022_a_schema_on_a_database_that_has_none(sqlite: Any) -> None:
    """Row 493."""
    sqlite(transaction_mode="IMMEDIATE", init_command=WAL)
    [error] = databases.check_databases(None, databases=["default"])
    assert (error.id, error.is_serious()) == ("django_outbox.E022", True)
    assert "TABLE_PREFIX" in (error.hint or "")


def test_w023_a_migrated_database_without_our_tables(sqlite: Any) -> None:
    """Row 495: silent at the very first migrate, which checks too."""
    connection = sqlite(transaction_mode="IMMEDIATE", init_command=WAL)
    assert databases.check_databases(None, databases=["default"]) == []

    MigrationRecorder(connection).ensure_schema()
    [warning] = databases.check_databases(None, databases=["default"])
    assert (warning.id, warning.is_serious()) == ("django_outbox.W023", False)
    assert "manage.py migrate django_outbox --database default" in warning.msg

    with connection.schema_editor() as editor:
        editor.create_model(outbox_models.OutboxEvent)
    [warning] = databases.check_databases(None, databases=["default"])
    assert "outbox_pause" in warning.msg  # a worker of a version that cannot do without it

    with connection.schema_editor() as editor:
        editor.create_model(outbox_models.OutboxPause)
    assert databases.check_databases(None, databases=["default"]) == []


def test_a_database_that_cannot_be_reached_is_not_said_to_lack_tables(
    sqlite: Any, tmp_path: Path
) -> None:
    """Row 495: the worker waits for it."""
    connection = sqlite()
    connection.settings_dict["NAME"] = str(tmp_path / "no" / "such" / "directory.sqlite3")
    assert outbox_models.missing_table("default") is None


def test_writer_only_says_what_has_no_effect(settings: Any) -> None:
    """Rows 277, 279: nothing is delivered there, and no listener is asked for."""
    settings.OUTBOX = {"MODE": "writer_only", "WORKERS": 2, "LEASE": 60}
    (found,) = [each for each in ours() if each.id == "django_outbox.W006"]
    assert "WORKERS" in found.msg
    assert "LEASE" in found.msg
    settings.OUTBOX = {"MODE": "multi_node", "WORKERS": 2}
    assert not [each for each in ours() if each.id == "django_outbox.W006"]


@pytest.mark.django_db
@pytest.mark.skipif(connections["default"].vendor != "mysql", reason="only MySQL has such a limit")
def test_a_payload_that_the_server_would_not_take() -> None:
    with override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 2**20}):
        assert "django_outbox.W027" not in ids(["default"])
    with override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 2**30}):
        (found,) = [each for each in ours(["default"]) if each.id == "django_outbox.W027"]
    assert "max_allowed_packet" in found.msg
    assert str(2**30) in found.msg


# --- connections: settings of a PostgreSQL that need not be there ---------------------------------


class Aliases:
    """Looks like ``django.db.connections`` to a check that opens none."""

    def __init__(self, **settings: dict[str, Any]) -> None:
        self.settings = settings

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __getitem__(self, alias: str) -> Any:
        vendor = self.settings[alias].get("VENDOR", "postgresql")
        return SimpleNamespace(alias=alias, vendor=vendor)


@pytest.fixture
def postgres(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the checks see these aliases."""

    def use(**settings: dict[str, Any]) -> None:
        for room in (databases, deploying, pooling):
            monkeypatch.setattr(room, "connections", Aliases(**settings))

    return use


POOLS: dict[str, tuple[Any, int, bool]] = {
    "none": (None, 50, False),
    "the default, which is 4": (True, 4, False),
    "the default is too small": (True, 5, True),
    "large enough": ({"max_size": 8}, 8, False),
    "too small": ({"min_size": 2, "max_size": 7}, 8, True),
    "fixed": ({"min_size": 3}, 4, True),
    "fixed, large enough": ({"min_size": 4}, 4, False),
}


@pytest.mark.parametrize("name", POOLS)
def test_w051_a_pool_smaller_than_the_threads(postgres: Any, settings: Any, name: str) -> None:
    pool, threads, is_small = POOLS[name]
    postgres(default={"OPTIONS": {"pool": pool} if pool else {}})
    settings.OUTBOX = {"WORKERS": threads}
    found = [each for each in ours() if each.id == "django_outbox.W051"]
    assert len(found) == is_small
    assert all(f'max_size"] to {threads}' in (each.hint or "") for each in found)


DIRECT: dict[str, Any] = {"PORT": "5432"}
POOLED: dict[str, Any] = {"PORT": "6432"}
DOORBELLS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "direct": ({"default": DIRECT}, {}, False),
    "no port": ({"default": {}}, {}, False),
    "the pooler's port": ({"default": POOLED}, {}, True),
    "cursors": ({"default": {"DISABLE_SERVER_SIDE_CURSORS": True}}, {}, True),
    "asked for": ({"default": POOLED}, {"DOORBELL": "postgres"}, True),
    "a direct alias": (
        {"default": POOLED, "direct": DIRECT},
        {"DOORBELL": {"kind": "postgres", "database": "direct"}},
        False,
    ),
    "another doorbell": ({"default": POOLED}, {"DOORBELL": "local"}, False),
    "no doorbell": ({"default": POOLED}, {"DOORBELL": None}, False),
    "nobody listens": ({"default": POOLED}, {"MODE": "writer_only"}, False),
    "another database": ({"default": {**POOLED, "VENDOR": "mysql"}}, {}, False),
}


@pytest.mark.parametrize("name", DOORBELLS)
def test_w052_listening_through_a_pooler(postgres: Any, settings: Any, name: str) -> None:
    aliases, outbox, is_pooled = DOORBELLS[name]
    postgres(**aliases)
    settings.OUTBOX = outbox
    found = [each for each in ours() if each.id == "django_outbox.W052"]
    assert bool(found) == is_pooled
    assert all('"database": "direct"' in (each.hint or "") for each in found)


# --- check --deploy -------------------------------------------------------------------------------


def test_a_sound_deployment_hears_nothing() -> None:
    assert deployed() == []


@pytest.mark.parametrize(
    ("change", "found"),
    [({"CONN_MAX_AGE": None}, True), ({"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}, False),
     ({"CONN_MAX_AGE": 60}, False), ({}, False),
     ({"CONN_MAX_AGE": None, "VENDOR": "sqlite"}, False)],
    ids=["kept", "checked", "a minute", "closed", "a file"],
)  # fmt: skip
def test_w050_connections_that_are_kept_and_never_checked(
    postgres: Any, change: dict[str, Any], found: bool
) -> None:
    postgres(default=change)
    assert [each.id for each in deployed()] == ["django_outbox.W050"] * found
    assert not [each for each in ours() if each.id == "django_outbox.W050"]


def test_w007_naive_times(settings: Any) -> None:
    settings.USE_TZ = False
    assert [each.id for each in deployed()] == ["django_outbox.W007"]


def hear(event: Event) -> None:
    """Do nothing."""


@pytest.mark.parametrize(("timeout", "found"), [(5, False), (5.1, True), (None, False)])
def test_w014_a_timeout_beyond_the_drain(timeout: float | None, found: bool) -> None:
    with listening(hear, "check.slow", timeout=timeout):
        messages = deployed()
    assert [each.id for each in messages] == ["django_outbox.W014"] * found
    assert all(f"{__name__}.hear" in each.msg for each in messages)


def call_out(event: Event) -> None:
    urlopen("http://127.0.0.1:1")


def mail(event: Event) -> None:
    send_mail("subject", "text", None, [])


class Caller:
    def tell(self, event: Event) -> None:
        smtplib.SMTP("127.0.0.1")


@pytest.mark.parametrize(
    ("call", "module"),
    [(call_out, "urllib.request"), (mail, "django.core.mail"), (Caller().tell, "smtplib"),
     (hear, None)],
    ids=["function", "mail", "method", "none"],
)  # fmt: skip
def test_i015_the_network_with_default_retries(call: Any, module: str | None) -> None:
    """Design 12: the default is spent after some 100 s."""
    with listening(call, "check.network"):
        found = deployed()
    assert [each.id for each in found] == ["django_outbox.I015"] * (module is not None)
    assert all(f"calls {module} " in each.msg for each in found)
    with listening(call, "check.network", retry=Fixed(delay=60, max_attempts=50)):
        assert deployed() == []
    with override_settings(OUTBOX={"RETRY": {"policy": "fixed"}}), listening(call, "check.network"):
        assert deployed() == []


def test_unfit_settings_are_told_once() -> None:
    with override_settings(OUTBOX={"LEESE": 1}):
        assert deployed() == []
        assert ids() == ["django_outbox.E001"]
