"""Migrations on the database of this run, and what they create there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.migrations.loader import MigrationLoader

from django_outbox.models import (
    OutboxEvent,
    OutboxInbox,
    OutboxLease,
    OutboxOperation,
    OutboxPause,
    OutboxStatistics,
    OutboxStream,
    OutboxWorker,
)
from tests import databases, migration_sql
from tests.plans import analyze
from tests.table import insert

ROOT = Path(__file__).resolve().parents[2]
MODELS = [
    OutboxEvent,
    OutboxInbox,
    OutboxLease,
    OutboxOperation,
    OutboxPause,
    OutboxStatistics,
    OutboxStream,
    OutboxWorker,
]
SECONDS = 100  # far more than a busy machine needs

vendor = databases.vendor()
only_postgres = pytest.mark.skipif(vendor != "postgres", reason="schemas are PostgreSQL's")
only_mysql = pytest.mark.skipif(connection.vendor != "mysql", reason="character sets are MySQL's")


# --- model, migration and table agree -------------------------------------------------------------


@pytest.mark.django_db(databases=["default", "other"])
def test_no_migration_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("makemigrations", check=True, dry_run=True)
    assert "No changes detected" in capsys.readouterr().out


def test_one_migration_has_every_table() -> None:
    loader = MigrationLoader(None)
    names = [name for app, name in loader.disk_migrations if app == "django_outbox"]
    assert names == ["0001_initial"]
    state = loader.project_state([("django_outbox", "0001_initial")])
    assert {model for app, model in state.models if app == "django_outbox"} == {
        model._meta.model_name for model in MODELS
    }


@pytest.mark.django_db(transaction=True)
def test_497_the_file_shows_what_the_migrations_run() -> None:
    kept = migration_sql.path(connection.vendor).read_text()
    assert kept == migration_sql.statements(), (
        f"OUTBOX_TEST_DB={vendor} python -m tests.migration_sql writes it anew; on each database"
    )


@pytest.mark.django_db
def test_the_database_fills_what_a_row_begins_with() -> None:
    """The defaults are in the table itself, not only in the model."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO outbox_event (id, event_id, event_type, payload, occurred_at, created_at) "
            "VALUES ('1', '1', 'x', 'null', '2030-01-01 00:00:00', '2030-01-01 00:00:00')"
        )
    row = OutboxEvent.objects.get()
    assert (row.aggregate_type, row.status, row.attempts, row.rescues) == ("__GLOBAL__", 0, 0, 0)
    assert row.queue == "default"


def constraints(table: str) -> dict[str, dict[str, Any]]:
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, table)
    return {
        name.rpartition("_")[0]: each
        for name, each in found.items()
        if each["index"] or each["unique"]
    }


@pytest.mark.django_db
def test_the_event_table_has_the_measured_indexes_and_no_more() -> None:
    """Each further index costs 4 to 29 % of the drain."""
    found = {
        name: each for name, each in constraints("outbox_event").items() if not each["primary_key"]
    }
    partial = connection.features.supports_partial_indexes
    # Few rows are dead: 60,000 updates took equally long with and without this index.
    by_vendor = {
        "outbox_event_stream": ["stream", "seq"],
        "outbox_event_dead": ["id"],
        "outbox_event_lost": ["id"],
    }
    if not partial:
        by_vendor = {
            "outbox_event_stream": ["stream", "status", "seq"],
            "outbox_event_due": ["available_at", "id"],
        }
    assert {name: each["columns"] for name, each in found.items()} == {
        "outbox_event_queue": ["queue", "available_at", "id"],
        "outbox_event_unique": ["unique_key"],
        **by_vendor,
    }
    assert [name for name, each in found.items() if each["unique"]] == ["outbox_event_unique"]
    of_streams = {
        name: each["columns"]
        for name, each in constraints("outbox_stream").items()
        if not each["primary_key"]
    }
    assert of_streams == {
        "outbox_stream_queue": ["queue", "due_at"],
        **({} if partial else {"outbox_stream_due": ["due_at"]}),
    }


@pytest.mark.django_db(transaction=True)
def test_a_due_event_is_found_by_its_index() -> None:
    """Without a queue too, as the admin and the statistics search."""
    insert(2000, due=3600)
    insert(20, due=-1)
    analyze(OutboxEvent)
    with transaction.atomic(), connection.cursor() as cursor:
        if vendor == "postgres":
            cursor.execute("SET LOCAL enable_seqscan = off")
        plan = OutboxEvent.objects.due()[:10].explain()
    partial = connection.features.supports_partial_indexes
    assert ("outbox_event_queue" if partial else "outbox_event_due") in plan


@pytest.mark.django_db
@pytest.mark.skipif(vendor == "sqlite", reason="compares bytes by itself")
@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.__name__)
def test_text_is_collated_by_its_bytes(model: Any) -> None:
    schema = "DATABASE()" if connection.vendor == "mysql" else "current_schema()"
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT column_name, collation_name FROM information_schema.columns WHERE table_name = "
            "%s AND data_type IN ('character varying', 'varchar', 'text', 'longtext') "
            f"AND table_schema = {schema}",
            [model._meta.db_table],
        )
        found = dict(cursor.fetchall())
    assert len(found) >= 2
    assert {*found.values()} == {{"mysql": "utf8mb4_bin", "postgresql": "C"}[connection.vendor]}


# --- an empty database, used by separate processes -----------------------------------------------


class Scratch:
    """An empty database, and what a process needs to use it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory

    def environment(self, **outbox: str) -> dict[str, str]:
        settings = {
            alias: {**connections["default"].settings_dict, "NAME": name}
            for alias, name in {"default": self.name, "other": f"{self.name}_other"}.items()
        }
        (self.directory / "scratch_settings.py").write_text(
            textwrap.dedent(
                """
                import json, os
                from tests.databases import databases

                DATABASES = {"default": databases()["default"]}
                INSTALLED_APPS = ["django_outbox"]
                DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
                OUTBOX = json.loads(os.environ["SCRATCH_OUTBOX"])
                """
            )
        )
        return {
            **os.environ,
            **databases.environment(settings),
            "DJANGO_SETTINGS_MODULE": "scratch_settings",
            "PYTHONPATH": f"{self.directory}{os.pathsep}{ROOT}",
            "SCRATCH_OUTBOX": json.dumps({"DOORBELL": None, **outbox}),
        }

    def start(self, *arguments: str, **outbox: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "error", *arguments],
            env=self.environment(**outbox),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def manage(self, *arguments: str, **outbox: str) -> str:
        return self.finish(self.start("-m", "django", *arguments, **outbox))

    def run(self, script: str, **outbox: str) -> Any:
        """Run a script after ``django.setup()``; return the JSON in the last line of its output."""
        code = "import django; django.setup()\n" + textwrap.dedent(script)
        return json.loads(self.finish(self.start("-c", code, **outbox)).splitlines()[-1])

    def finish(self, process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
        return output


CREATE = {
    "postgresql": 'CREATE DATABASE "{}"',
    "mysql": "CREATE DATABASE `{}` CHARACTER SET utf8mb3",  # as in old installations
}
DROP = {"postgresql": 'DROP DATABASE "{}" WITH (FORCE)', "mysql": "DROP DATABASE `{}`"}


@pytest.fixture
def scratch(tmp_path: Path, django_db_setup: None, django_db_blocker: Any) -> Iterator[Scratch]:
    if vendor == "sqlite":
        yield Scratch(str(tmp_path / "scratch.sqlite3"), tmp_path)
        return
    name = f"{connections['default'].settings_dict['NAME']}_scratch"
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(CREATE[connection.vendor].format(name))
        try:
            yield Scratch(name, tmp_path)
        finally:
            cursor.execute(DROP[connection.vendor].format(name))
            connection.close()


TABLES = """
    import json
    from django.db import connection
    print(json.dumps(sorted(connection.introspection.table_names())))
"""
WRITE_AND_DRAIN = """
    import json
    import django_outbox as outbox
    from django.db import transaction
    from django_outbox.models import OutboxEvent, missing_table

    seen = []
    outbox.listener("😀")(lambda event: seen.append(event.payload))
    with transaction.atomic():
        outbox.write("😀", "☕", aggregate_id="🍵", unique_key="u")
    outbox.drain()
    with transaction.atomic():
        again = outbox.write("😀", unique_key="u", on_duplicate="ignore")
    OutboxEvent.objects.update(done_at="2001-01-01T00:00:00Z")
    row = OutboxEvent.objects.get(pk=again)
    print(json.dumps({
        "seen": seen, "id": row.aggregate_id, "status": row.status, "missing": missing_table(None),
        "purged": OutboxEvent.objects.purge(),
    }))
"""
# In one process with WRITE_AND_DRAIN: starting another takes longer than any of these steps.
MIGRATE = """
    from django.core.management import call_command
    call_command("migrate", verbosity=0)
    call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)
"""
WORKS = {"seen": ["☕"], "id": "🍵", "status": 1, "missing": None, "purged": 1}
NAMES = sorted(model._meta.db_table for model in MODELS)


def test_migrations_run_forwards_and_backwards(scratch: Scratch) -> None:
    """Each direction works and can be repeated; MySQL and MariaDB start with a utf8mb3 database.

    MariaDB raises no W037, and the first migrate prints no reminder to migrate.
    """
    output = scratch.manage("migrate", "--verbosity=1")
    assert ("OK" in output, "WARNING" in output) == (True, False), output
    assert "no issues" in scratch.manage("check", "--database=default", "--fail-level=WARNING")
    assert scratch.run(TABLES) == sorted([*NAMES, "django_migrations"])
    assert scratch.run(WRITE_AND_DRAIN) == WORKS

    scratch.manage("migrate", "django_outbox", "zero", "--verbosity=0")
    assert scratch.run(TABLES) == ["django_migrations"]
    says = "has no table 'outbox_event'. Run: manage.py migrate django_outbox"
    output = scratch.manage("check", "--database=default")
    assert ("django_outbox.W023" in output, says in output) == (True, True), output
    worker = scratch.start("-m", "django", "outbox_worker", "--once")
    output, _ = worker.communicate(timeout=SECONDS)
    assert (worker.returncode, says in output, "Traceback" in output) == (1, True, False), output

    assert scratch.run(MIGRATE + WRITE_AND_DRAIN) == WORKS


FORGET = """
    from django.db import connection
    from django.db.migrations.recorder import MigrationRecorder
    MigrationRecorder(connection).flush()
"""


def test_two_installations_share_a_database_by_their_prefixes(scratch: Scratch) -> None:
    """Index names are global in PostgreSQL and SQLite, so they contain the prefix."""
    for prefix in ("app1_", "app2_"):
        script = MIGRATE + WRITE_AND_DRAIN + FORGET  # two projects would not share this record
        assert scratch.run(script, TABLE_PREFIX=prefix) == WORKS
    assert scratch.run(TABLES) == sorted(
        [f"{prefix}{name}" for prefix in ("app1_", "app2_") for name in NAMES]
        + ["django_migrations"]
    )


CREATE_SCHEMA = """
    import json
    from django.db import connection
    from django_outbox.models import missing_table
    connection.cursor().execute("CREATE SCHEMA my_schema")
    print(json.dumps(missing_table(None)))
"""


@only_postgres
def test_a_schema_holds_the_tables(scratch: Scratch) -> None:
    """The schema must exist before the migration, and can be combined with a prefix."""
    outbox = {"SCHEMA": "my_schema", "TABLE_PREFIX": "app1_"}
    assert "migrate" in scratch.run(CREATE_SCHEMA, **outbox)
    assert scratch.run(MIGRATE + WRITE_AND_DRAIN, **outbox) == WORKS
    found = """
        import json
        from django.db import connection
        with connection.cursor() as cursor:
            cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'my_schema'")
            print(json.dumps(sorted(name for name, in cursor.fetchall())))
    """
    assert scratch.run(found) == [f"app1_{name}" for name in NAMES]
    assert scratch.run(TABLES) == ["django_migrations"]

    scratch.manage("migrate", "django_outbox", "zero", "--verbosity=0", **outbox)
    assert scratch.run(found) == []


@only_mysql
def test_a_utf8mb3_database_holds_four_byte_texts(scratch: Scratch) -> None:
    scratch.manage("migrate", "--verbosity=0")
    found = scratch.run("""
        import json
        from django.db import connection
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@character_set_database")
            charset = cursor.fetchone()[0]
            cursor.execute("SELECT DISTINCT table_name, collation_name FROM "
                           "information_schema.columns WHERE table_schema = DATABASE() "
                           "AND table_name LIKE 'outbox%' AND collation_name IS NOT NULL")
            print(json.dumps([charset, sorted(map(list, cursor.fetchall()))]))
    """)
    assert found == ["utf8mb3", [[name, "utf8mb4_bin"] for name in NAMES]]
    assert scratch.run(WRITE_AND_DRAIN) == WORKS
