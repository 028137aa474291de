"""What importing the package loads, and which names it then has."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import django_outbox as outbox
from django_outbox.checks.queues import EXTRAS
from tests.rules import modules

ROOT = Path(outbox.__file__).parents[1]


def run(script: str) -> str:
    """Run a script in a separate Python process, where a warning is an error; return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_is_there() -> None:
    assert [name for name in outbox.__all__ if getattr(outbox, name, None) is None] == []
    assert {*outbox.__all__} <= {*dir(outbox)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = outbox.nonsense
    with pytest.raises(ImportError):
        from django_outbox import nonsense  # noqa: F401


def test_importing_the_package_imports_nothing_else() -> None:
    """``import django_outbox`` works before there are settings."""
    assert (
        run("""
        import sys
        import django_outbox
        print(sorted(name for name in sys.modules if name.split(".")[0] in ("django", "msgspec")))
    """).strip()
        == "[]"
    )


def test_the_lowest_layers_need_no_settings_no_orm_and_no_threads() -> None:
    said = run("""
        import sys, threading
        from django_outbox import conf, events, exceptions, signals
        from django_outbox.listeners import outcomes, retry
        print(sorted(name for name in sys.modules if name.startswith("django.db.models")))
        from django_outbox import Dead, Event, Exponential, RetryAfter, listener, write
        from django.conf import settings
        print(settings.configured, threading.active_count())
    """)
    assert said.splitlines() == ["[]", "False 1"]


SETUP = """
    import sys, threading
    import django
    from django.conf import settings
    settings.configure(
        INSTALLED_APPS=["django.contrib.admin", "django.contrib.auth", "django.contrib.messages",
                        "django.contrib.contenttypes", "django_outbox"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "nowhere/x"}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    django.setup()
"""


def test_starting_the_app_opens_no_connection_and_starts_no_thread() -> None:
    assert (
        run(
            SETUP
            + """
    from django.db import connections
    print([each.connection for each in connections.all()], threading.active_count())
    """
        ).strip()
        == "[None] 1"
    )


def test_every_module_imports_without_the_extras() -> None:
    """A missing extra breaks no import."""
    paths = [Path(each.path) for each in modules(ROOT) if "/contrib/" not in each.path]
    names = sorted(
        {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
        - {path.rpartition(".")[0] for path in EXTRAS}  # backends that settings name
    )
    script = """
    class Nothing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("psycopg", "psycopg2", "MySQLdb", "redis", "django_tasks",
                                      "prometheus_client", "opentelemetry"):
                raise ModuleNotFoundError(name)
    sys.meta_path.insert(0, Nothing())
    from importlib import import_module
    """
    imported = run(f"{SETUP}{script}print(len([import_module(name) for name in {names!r}]))")
    assert int(imported) == len(names)
    assert len(names) > 30
