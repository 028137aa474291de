"""System checks: their ids, messages and hints; test_registry has those of listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.utils import ConnectionHandler
from django.test import override_settings

from django_outbox import Event, checks, conf, hooks
from django_outbox import models as outbox_models
from django_outbox.checks import databases
from django_outbox.events import encode
from django_outbox.listeners import registry
from tests.cases import cases
from tests.table import listening


class Half:
    dumps = staticmethod(encode)


def ours(databases: list[str] | None = None) -> list[CheckMessage]:
    # Not all checks: those of models query MySQL, which most tests here are not allowed to.
    tags = ["django_outbox", *(["database"] if databases else [])]
    return [
        each
        for each in run_checks(tags=tags, databases=databases)
        if each.id and each.id.startswith("django_outbox")
    ]


def deployed() -> list[CheckMessage]:
    """Return what only ``check --deploy`` reports."""
    found = run_checks(tags=["django_outbox"], include_deployment_checks=True)
    usual = {each.id for each in ours()}
    return [each for each in found if each.id not in usual]


def ids(databases: list[str] | None = None) -> list[str | None]:
    return [each.id for each in ours(databases)]


@pytest.mark.django_db(databases=["default", "other"])
def test_a_sound_project_hears_nothing() -> None:
    assert ours([*connections]) == []


@cases(
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
    with override_settings(OUTBOX=outbox):
        [error] = ours()
    assert (error.id, error.is_serious()) == ("django_outbox.E001", True)
    assert message in error.msg
    assert hint in (error.hint or "")


@cases(
    "outbox",
    [
        {"RETRY": "nonsense"},
        {"RETRY": {"policy": "nonsense"}},
        {"RETRY": {"base": -1}},
        {"RETRY": 5},
        {"SERIALIZER": "nonsense.x"},
        {"SERIALIZER": "tests.test_checks.Half"},
        {"SERIALIZER": 5},
    ],
    ids=str,
)
def test_e002_a_path_that_leads_to_nothing_usable(outbox: dict[str, Any]) -> None:
    with override_settings(OUTBOX=outbox):
        [error] = ours()
    assert (error.id, error.is_serious()) == ("django_outbox.E002", True)
    assert f'OUTBOX["{next(iter(outbox))}"]' in error.msg


class Useless:
    """A class without any of the methods of a writer hook."""


class Needy:
    def __init__(self, client: object) -> None:
        """Require an argument, which the package does not pass."""

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
    "async method": ("WRITER_HOOKS", "tests.test_checks.Awaited", "not an ordinary method"),
    "no provider": ("CONTEXT_PROVIDERS", "nonsense.provider", "cannot be imported"),
    "not callable": ("CONTEXT_PROVIDERS", "tests.test_checks.WRONG_PATHS", "ordinary function"),
    "async provider": (
        "CONTEXT_PROVIDERS",
        "tests.test_checks.awaited_context",
        "ordinary function",
    ),
}


@cases("name", WRONG_PATHS)
def test_e002_a_path_of_a_list_that_leads_to_nothing_usable(name: str) -> None:
    """The check reports what would fail at the first write."""
    setting, path, says = WRONG_PATHS[name]
    with override_settings(OUTBOX={setting: [path]}):
        [error] = ours()
        with pytest.raises(ImproperlyConfigured, match=says):
            _ = hooks.writer_hooks(), hooks.context()
    assert (error.id, error.is_serious()) == ("django_outbox.E002", True)
    assert f'OUTBOX["{setting}"] names {path!r}' in error.msg
    assert says in error.msg


@cases(
    ("change", "refused"),
    [
        ({}, True),
        ({"UNROUTABLE_GRACE": 0}, False),
        ({"UNROUTABLE": "ignore"}, False),
        ({"ORDERING": "aggregate"}, False),
        ({"MODE": "multi_node"}, False),
    ],
    ids=str,
)
def test_e003_one_stream_waits_for_no_listener(change: dict[str, Any], refused: bool) -> None:
    """An unroutable event would block every other event for the grace period."""
    with override_settings(OUTBOX={"MODE": "ordered", "ORDERING": "global", **change}):
        found = [each for each in ours() if each.id == "django_outbox.E003"]
    assert bool(found) == refused
    assert all("UNROUTABLE_GRACE" in (each.hint or "") for each in found)


@pytest.mark.parametrize(
    ("embedded", "debug", "found"),
    [(True, False, ["django_outbox.W030"]), (True, True, []), (False, False, [])],
)
def test_w030_embedded_workers_need_traffic(embedded: bool, debug: bool, found: list[str]) -> None:
    with override_settings(OUTBOX={"EMBEDDED": embedded}, DEBUG=debug):
        assert [each.id for each in ours() if not each.is_serious()] == found


@cases(
    ("name", "hint"),
    [
        ("listeners", None),  # tests.testapp has it
        ("nowhere", ""),
        ("listener", '"listeners"'),
        ("handlers", ""),  # an app of Django's has it
        ("testapp.listeners", '"listeners"'),
        ("sub.listeners", '"listeners"'),
    ],
)
def test_w060_a_module_that_no_app_has(name: str, hint: str | None) -> None:
    with override_settings(OUTBOX={"LISTENER_MODULE": name}):
        found = [each for each in ours() if each.id == "django_outbox.W060"]
    assert len(found) == (hint is not None)
    assert all(repr(name) in each.msg and (hint or "") in (each.hint or "") for each in found)


@pytest.mark.parametrize(("module", "warned"), [("listener", True), ("filters", False)])
def test_w060_a_module_that_is_called_nearly_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, warned: bool
) -> None:
    app = tmp_path / f"shop_with_{module}"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / f"{module}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with override_settings(INSTALLED_APPS=["django_outbox", app.name]):
        found = [each for each in ours() if each.id == "django_outbox.W060"]
    assert [f'"{module}"' in (each.hint or "") for each in found] == [True] * warned


# --- databases: a separate SQLite file, whatever this run uses ------------------------------------


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
        for room in (checks, databases):
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
    """With deferred transactions, 43 % of the business transactions failed."""
    connection = sqlite(**options)
    messages = [each for each in ours() if each.id == "django_outbox.W020"]

    assert [each.id for each in messages] == found
    assert all('"transaction_mode": "IMMEDIATE"' in (each.hint or "") for each in messages)
    assert connection.connection is None  # the check opens no connection


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"init_command": WAL}, False)])
def test_w021_sqlite_without_write_ahead_log(
    sqlite: Any, options: dict[str, str], warned: bool
) -> None:
    sqlite(transaction_mode="IMMEDIATE", **options)
    found = list(databases.check_databases(None, databases=["default"]))
    assert [each.id for each in found] == ["django_outbox.W021"] * warned
    assert all("journal_mode=WAL" in (each.hint or "") for each in found)


def test_databases_that_were_not_asked_for_are_not_looked_at(sqlite: Any) -> None:
    connection = sqlite()
    assert list(databases.check_databases(None, databases=None)) == []
    assert list(databases.check_databases(None, databases=["other"])) == []
    assert connection.connection is None


@override_settings(OUTBOX={"SCHEMA": "my"})
def test_e022_a_schema_on_a_database_that_has_none(sqlite: Any) -> None:
    sqlite(transaction_mode="IMMEDIATE", init_command=WAL)
    [error] = databases.check_databases(None, databases=["default"])
    assert (error.id, error.is_serious()) == ("django_outbox.E022", True)
    assert "TABLE_PREFIX" in (error.hint or "")


@pytest.mark.django_db  # W058 reads the workers by the ORM, which keeps its own connections
def test_w023_a_migrated_database_without_our_tables(sqlite: Any) -> None:
    """The check is silent at the very first migrate, which runs checks too."""
    connection = sqlite(transaction_mode="IMMEDIATE", init_command=WAL)
    assert list(databases.check_databases(None, databases=["default"])) == []

    MigrationRecorder(connection).ensure_schema()
    [warning] = databases.check_databases(None, databases=["default"])
    assert (warning.id, warning.is_serious()) == ("django_outbox.W023", False)
    assert "manage.py migrate django_outbox --database default" in warning.msg

    with connection.schema_editor() as editor:
        editor.create_model(outbox_models.OutboxEvent)
    [warning] = databases.check_databases(None, databases=["default"])
    assert "outbox_pause" in warning.msg  # workers of this version need it

    with connection.schema_editor() as editor:
        editor.create_model(outbox_models.OutboxPause)
        editor.create_model(outbox_models.OutboxOperation)
        editor.create_model(outbox_models.OutboxLease)
        editor.create_model(outbox_models.OutboxWorker)
    assert list(databases.check_databases(None, databases=["default"])) == []


def test_a_database_that_cannot_be_reached_is_not_said_to_lack_tables(
    sqlite: Any, tmp_path: Path
) -> None:
    """The worker waits for such a database."""
    connection = sqlite()
    connection.settings_dict["NAME"] = str(tmp_path / "no" / "such" / "directory.sqlite3")
    assert outbox_models.missing_table("default") is None


# The settings that a process uses if it only writes, or purges.
NEEDED_TO_WRITE = """
MODE ENABLED LOCK_WAIT RETENTION_DONE RETENTION_INBOX PURGE_BATCH_SIZE PURGE_INTERVAL
MAX_PAYLOAD_BYTES SERIALIZER WRITER_HOOKS CONTEXT_PROVIDERS SIGNAL_BRIDGE LISTENER_MODULE
TABLE_PREFIX SCHEMA METRICS_NAMESPACE REDACT
""".split()
OTHER_THAN_DEFAULT = {
    "EMBEDDED": True,
    "FAIRNESS": (3, 1),
    "RETRY": {"policy": "fixed"},
    "UNROUTABLE": "ignore",
    "ROUTE": "worker",
    "DOORBELL": None,
    "INTERCEPTORS": ["django_outbox.contrib.logs.restore"],
    "ORDERING": "global",
    "ON_DEAD": "block",
    "STOP_ON_FIRST_FAILURE": False,
    "QUEUES": {"hooks": {}},
    "RELAYS": {"orders": {"BACKEND": "tests.relay_backend.InMemory", "EVENTS": ["order.*"]}},
}


@pytest.fixture
def idle() -> Callable[[], list[str]]:
    """Return a function that lists what W006 names, without the listeners of the suite's apps."""
    usual = {each.where for each in registry.listeners()}

    def ask() -> list[str]:
        found = [each for each in ours() if each.id == "django_outbox.W006"]
        assert len(found) <= 1
        assert all("Warning" in type(each).__name__ for each in found)
        text = found[0].msg.partition("no effect: ")[2].removesuffix(".") if found else ""
        return [each for each in text.split(", ") if each and each not in usual]

    return ask


Idle = Callable[[], list[str]]


@cases("name", sorted({*conf.RULES} - {*NEEDED_TO_WRITE}))
def test_w006_a_setting_that_has_no_effect_in_writer_only(
    settings: Any, idle: Idle, name: str
) -> None:
    """W006 reports each setting that only delivery uses."""
    default = getattr(conf.Settings(), name)
    value = OTHER_THAN_DEFAULT[name] if name in OTHER_THAN_DEFAULT else (default or 2) + 1
    settings.OUTBOX = {"MODE": "writer_only", name: value}
    assert idle() == [name]
    settings.OUTBOX = {"MODE": "multi_node", name: value}
    assert idle() == []
    settings.OUTBOX = {"MODE": "writer_only", name: default}  # the default is like no setting
    assert idle() == []


def test_w006_listeners_in_writer_only(settings: Any, idle: Idle) -> None:
    settings.OUTBOX = {"MODE": "writer_only"}
    assert idle() == []
    with listening(hear, "check.heard"):
        (where,) = idle()
        assert f"{__name__}.hear" in where
        settings.OUTBOX = {}
        assert idle() == []


# --- connections: settings of a PostgreSQL that need not exist ------------------------------------


class Aliases:
    """Stands in for ``django.db.connections``, for checks that open no connection."""

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
        for room in (checks, databases):
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


@cases("name", POOLS)
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


@cases("name", DOORBELLS)
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


@cases(
    ("change", "found"),
    [
        ({"CONN_MAX_AGE": None}, True),
        ({"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}, False),
        ({"CONN_MAX_AGE": 60}, False),
        ({}, False),
        ({"CONN_MAX_AGE": None, "VENDOR": "sqlite"}, False),
    ],
    ids=["kept", "checked", "a minute", "closed", "a file"],
)
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
