"""The house: names, imports, floors, sizes, reference (rows 10, 11, 48, 49, 60, +2, +3)."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_outbox as outbox
from django_outbox import conf, exceptions, signals

PACKAGE = Path(outbox.__file__).parent
ROOT = PACKAGE.parent
REFERENCE = ROOT / "docs" / "reference"
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if "migrations" not in path.relative_to(PACKAGE).parts
)
MODULE_LINES = 350
FUNCTION_LINES = 40  # of its body

# Design section 3, as far as it is built. A name more or less is a decision, not an accident.
PUBLIC = """
write write_many awrite awrite_many Event event OutboxSignal GLOBAL
listener ANY Done Defer Dead Failure RetryAfter Recoverable Unrecoverable
RetryPolicy Exponential Fixed Linear Jittered
drain Worker inbox
OutboxError NoActiveTransaction InvalidEvent PayloadTooLarge DuplicateEvent
ListenerAlreadyRegistered UnroutableEvent PayloadError ListenerTimeout
""".split()


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def run(script: str) -> str:
    """Run a script in a Python of its own, where a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- public names ------------------------------------------------------------------------------


def test_all_is_what_is_public() -> None:
    """Rows 23, 132, 403, +3: no transaction context, no builders, one predefined aggregate type."""
    assert sorted(outbox.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    """Row +3."""
    assert getattr(outbox, name) is not None
    assert name in dir(outbox)


def test_types_and_runtime_know_the_same_names() -> None:
    """Row +3: the imports for type checkers against those of PEP 562."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(each for each in tree.body if isinstance(each, ast.If))
    typed = {
        alias.name: each.module
        for each in block.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    assert typed == outbox._ROOMS
    assert sorted(typed) == sorted(outbox.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = outbox.nonsense
    with pytest.raises(ImportError):
        from django_outbox import nonsense  # noqa: F401


def test_every_error_is_public() -> None:
    defined = {name for name, each in vars(exceptions).items()
               if isinstance(each, type) and each.__module__ == exceptions.__name__}  # fmt: skip
    assert defined <= {*outbox.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name: str) -> None:
    value = getattr(outbox, name)
    if callable(value):
        assert (value.__doc__ or "").strip()


# --- imports -----------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_else() -> None:
    """Row 48: ``import django_outbox`` works before there are settings."""
    assert run("""
        import sys
        import django_outbox
        print(sorted(name for name in sys.modules if name.split(".")[0] in ("django", "msgspec")))
    """).strip() == "[]"  # fmt: skip


def test_ground_and_bedrock_need_no_settings_no_orm_and_no_threads() -> None:
    """Row 10."""
    assert run("""
        import sys, threading
        from django_outbox import conf, events, exceptions, outcomes, retry, signals
        from django_outbox import Dead, Event, Exponential, RetryAfter, listener, write
        from django.conf import settings
        assert not settings.configured
        print("django.apps.config" in sys.modules, threading.active_count())
    """).split()[1] == "1"  # fmt: skip
    assert run("""
        import sys
        from django_outbox import conf, events, exceptions, outcomes, retry, signals
        print(sorted(name for name in sys.modules if name.startswith("django.db.models")))
    """).strip() == "[]"  # fmt: skip


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
    """Rows 48, 49, 443."""
    assert run(SETUP + """
    from django.db import connections
    print([each.connection for each in connections.all()], threading.active_count())
    """).strip() == "[None] 1"  # fmt: skip


def test_every_module_imports_without_the_extras() -> None:
    """Rows 11, 60: their absence breaks no import."""
    paths = [path.relative_to(ROOT) for path in MODULES if "contrib" not in path.parts]
    names = sorted(".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths)
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


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.skipif(not shutil.which("lint-imports", path=str(Path(sys.executable).parent)),
                    reason="import-linter is not installed; tox -e floors runs it")  # fmt: skip
def test_imports_go_down_only() -> None:
    """Rows 10, +2."""
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True,
                          check=False, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


# --- sizes -------------------------------------------------------------------------------------


def functions() -> Iterator[tuple[str, int]]:
    """Every function with the number of lines of its body, less those of its docstring."""
    for path in MODULES:
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = each.body[1:] if ast.get_docstring(each) else each.body
                lines = (each.end_lineno or 0) - body[0].lineno + 1 if body else 0
                yield f"{relative(path)}:{each.lineno} {each.name}", lines


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_is_short(path: Path) -> None:
    """Design 9."""
    assert len(path.read_text().splitlines()) <= MODULE_LINES


def test_functions_are_short() -> None:
    """Design 9, style: the median below 10 lines."""
    found = dict(functions())
    assert {name: lines for name, lines in found.items() if lines > FUNCTION_LINES} == {}
    assert statistics.median(found.values()) < 10


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    """Style: one sentence on top."""
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text))


# --- one place for each thing ------------------------------------------------------------------


def test_words_have_one_meaning() -> None:
    """Design 2: no module is called what everything could be called."""
    banned = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "service",
              "services", "handlers", "jobs"}  # fmt: skip
    names = {part for path in MODULES for part in Path(relative(path)).with_suffix("").parts}
    assert names & banned == set()


def test_raw_sql_is_in_dialects_alone() -> None:
    """Rows 42, 183; design 9. The checks ask SQLite for its journal mode."""
    users = {relative(path) for path in MODULES
             if re.search(r"\.execute\(|RawSQL|\.raw\(|\.extra\(", path.read_text())}  # fmt: skip
    assert {name for name in users if not name.startswith("dialects")} == {"checks.py"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Row 301."""
    for path in MODULES:
        for each in ast.walk(ast.parse(path.read_text())):
            name = getattr(each, "id", getattr(each, "name", "")) or getattr(each, "module", "")
            assert name not in ("pickle", "marshal", "shelve", "eval", "exec"), relative(path)


# --- the reference -----------------------------------------------------------------------------


def text_of(page: str) -> str:
    return (REFERENCE / page).read_text()


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(conf.Settings)])
def test_every_setting_is_in_the_reference(name: str) -> None:
    assert f"`{name}`" in text_of("settings.md")


def test_the_reference_knows_no_other_setting() -> None:
    known = {each.name for each in dataclasses.fields(conf.Settings)}
    first_cells = " ".join(re.findall(r"^\| (`[A-Z].*?) \|", text_of("settings.md"), re.MULTILINE))
    assert set(re.findall(r"`([A-Z_]+)`", first_cells)) == known


def check_ids() -> set[str]:
    source = (PACKAGE / "checks.py").read_text()
    return set(re.findall(r'id="django_outbox\.([EWI]\d{3})"', source))


def test_every_check_is_in_the_reference() -> None:
    assert check_ids() == set(re.findall(r"`django_outbox\.([EWI]\d{3})`", text_of("checks.md")))
    assert len(check_ids()) >= 9


@pytest.mark.parametrize(
    "name", [name for name, each in vars(signals).items() if isinstance(each, signals.Signal)]
)
def test_every_signal_is_in_the_reference(name: str) -> None:
    assert f"`{name}`" in text_of("signals.md")


def test_every_command_is_in_the_reference() -> None:
    import django_outbox.management.commands as commands

    for each in pkgutil.iter_modules(commands.__path__):
        assert f"`{each.name}`" in text_of("commands.md")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert f"{name}" in text_of("api.md") + text_of("errors.md")


def test_every_name_of_the_test_kit_is_in_the_reference() -> None:
    """Row 517."""
    from django_outbox import testing

    section = text_of("api.md").partition("## Testing")[2].partition("\n## ")[0]
    assert sorted(set(re.findall(r"^\| `(\w+)", section, re.MULTILINE))) == sorted(testing.__all__)
    for name in testing.__all__:
        assert getattr(testing, name).__doc__


def test_every_column_is_in_the_reference() -> None:
    models = importlib.import_module("django_outbox.models")
    page = text_of("tables.md")
    for field in models.OutboxEvent._meta.local_fields:
        assert f"`{field.column}`" in page
