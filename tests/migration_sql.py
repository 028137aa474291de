"""The SQL of the migrations on each database, in files that reviews read.

``OUTBOX_TEST_DB=postgres python -m tests.migration_sql`` writes the file of that database; each
database's run of the suite compares its own. MySQL and MariaDB have one together.
"""

from __future__ import annotations

from pathlib import Path

import django

FOLDER = Path(__file__).resolve().parent / "conformance" / "migrations"


def main() -> None:
    django.setup()
    from django.db import connection

    name = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True)  # a server starts without one
    try:
        path(connection.vendor).write_text(statements())
    finally:
        connection.creation.destroy_test_db(name, verbosity=0)


def statements() -> str:
    """Return what the migrations of the outbox run on this database, one statement a paragraph."""
    from django.db import connection
    from django.db.migrations.loader import MigrationLoader

    loader = MigrationLoader(connection, replace_migrations=False)
    names = sorted(name for app, name in loader.graph.nodes if app == "django_outbox")
    plan = [(loader.graph.nodes["django_outbox", name], False) for name in names]
    return (
        "\n\n".join(formatted(sql) for sql in loader.collect_sql(plan) if is_statement(sql)) + "\n"
    )


def is_statement(sql: str) -> bool:
    return not sql.startswith("--") and sql not in ("BEGIN;", "COMMIT;")


def formatted(sql: str) -> str:
    """One column a line, so that a change shows which one."""
    if not sql.startswith("CREATE TABLE"):
        return sql
    head, _, columns = sql.partition(" (")
    depth, lines, line = 0, [], ""
    for sign in columns.removesuffix(");"):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if sign == "," and not depth:
            lines.append(line.strip())
            line = ""
        else:
            line += sign
    return f"{head} (\n    " + ",\n    ".join([*lines, line.strip()]) + "\n);"


def path(vendor: str) -> Path:
    return FOLDER / f"{vendor}.sql"


if __name__ == "__main__":
    main()
