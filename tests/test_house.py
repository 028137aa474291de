"""The whole package: public names, imports, layers, sizes and the reference pages."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import importlib
import inspect
import pkgutil
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import BaseCommand, load_command_class

import django_outbox as outbox
from django_outbox import conf, exceptions, signals
from django_outbox.checks.relays import EXTRAS
from django_outbox.listeners import retry
from django_outbox.management import commands
from tests import databases, samples

pytestmark = pytest.mark.any_database

PACKAGE = Path(outbox.__file__).parent
ROOT = PACKAGE.parent
REFERENCE = ROOT / "docs" / "reference"
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if "migrations" not in path.relative_to(PACKAGE).parts
)
MODULE_LINES = 350
FUNCTION_LINES = 40  # of its body, without the docstring

# The public names. Change this list only by decision, never to make the test pass.
PUBLIC = """
write write_many awrite awrite_many Event event OutboxSignal GLOBAL
listener ANY Done Defer Dead Failure RetryAfter Unrecoverable
RetryPolicy Exponential Fixed Linear Jittered
drain Worker inbox
OutboxError NoActiveTransaction InvalidEvent PayloadTooLarge DuplicateEvent
ListenerAlreadyRegistered UnroutableEvent PayloadError ListenerTimeout BrokerUnavailable
""".split()


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def run(script: str) -> str:
    """Run a script in a separate Python process, where a warning is an error; return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- public names ------------------------------------------------------------------------------


def test_all_is_what_is_public() -> None:
    """The package exports no transaction context, no builders and one predefined aggregate type."""
    assert sorted(outbox.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(outbox, name) is not None
    assert name in dir(outbox)


def test_types_and_runtime_know_the_same_names() -> None:
    """The imports for type checkers match the names that PEP 562's ``__getattr__`` loads."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(each for each in tree.body if isinstance(each, ast.If))
    typed = {
        alias.name: each.module
        for each in block.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    assert typed == outbox._MODULES
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
    """``import django_outbox`` works before there are settings."""
    assert run("""
        import sys
        import django_outbox
        print(sorted(name for name in sys.modules if name.split(".")[0] in ("django", "msgspec")))
    """).strip() == "[]"  # fmt: skip


def test_the_lowest_layers_need_no_settings_no_orm_and_no_threads() -> None:
    assert run("""
        import sys, threading
        from django_outbox import conf, events, exceptions, signals
        from django_outbox.listeners import outcomes, retry
        from django_outbox import Dead, Event, Exponential, RetryAfter, listener, write
        from django.conf import settings
        assert not settings.configured
        print("django.apps.config" in sys.modules, threading.active_count())
    """).split()[1] == "1"  # fmt: skip
    assert run("""
        import sys
        from django_outbox import conf, events, exceptions, signals
        from django_outbox.listeners import outcomes, retry
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
    assert run(SETUP + """
    from django.db import connections
    print([each.connection for each in connections.all()], threading.active_count())
    """).strip() == "[None] 1"  # fmt: skip


def test_every_module_imports_without_the_extras() -> None:
    """A missing extra breaks no import."""
    paths = [path.relative_to(ROOT) for path in MODULES if "contrib" not in path.parts]
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


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.skipif(not shutil.which("lint-imports", path=str(Path(sys.executable).parent)),
                    reason="import-linter is not installed; tox -e layers runs it")  # fmt: skip
def test_imports_go_down_only() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True,
                          check=False, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


# --- sizes -------------------------------------------------------------------------------------


def functions() -> Iterator[tuple[str, int]]:
    """Yield every function with the number of lines of its body, without its docstring."""
    for path in MODULES:
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = each.body[1:] if ast.get_docstring(each) else each.body
                lines = (each.end_lineno or 0) - body[0].lineno + 1 if body else 0
                yield f"{relative(path)}:{each.lineno} {each.name}", lines


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES


def test_functions_are_short() -> None:
    """No body is longer than FUNCTION_LINES, and the median is below 10 lines."""
    found = dict(functions())
    assert {name: lines for name, lines in found.items() if lines > FUNCTION_LINES} == {}
    assert statistics.median(found.values()) < 10


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    """Every module has a docstring."""
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text))


# --- one place for each thing ------------------------------------------------------------------


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = re.findall(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.py)?)`", (ROOT / page).read_text())
    missing = [name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())]
    assert len(named) > 20
    assert missing == []


def test_words_have_one_meaning() -> None:
    """No module has a name that could be given to anything."""
    banned = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "service",
              "services", "handlers", "jobs"}  # fmt: skip
    names = {part for path in MODULES for part in Path(relative(path)).with_suffix("").parts}
    assert names & banned == set()


def test_raw_sql_is_in_one_package_alone() -> None:
    """Raw SQL is in ``sql`` only, except the check that asks SQLite for its journal mode."""
    users = {relative(path) for path in MODULES
             if re.search(r"\.execute\(|RawSQL|\.raw\(|\.extra\(", path.read_text())}  # fmt: skip
    assert {name for name in users if not name.startswith("sql/")} == {"checks/databases.py"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    for path in MODULES:
        for each in ast.walk(ast.parse(path.read_text())):
            name = getattr(each, "id", getattr(each, "name", "")) or getattr(each, "module", "")
            assert name not in ("pickle", "marshal", "shelve", "eval", "exec"), relative(path)


# --- the reference -----------------------------------------------------------------------------


def text_of(page: str) -> str:
    return (REFERENCE / page).read_text()


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(conf.Settings)])
def test_every_setting_is_in_the_reference(name: str) -> None:
    row = re.search(rf"^\| `{name}` \| `([^`]+)`", text_of("settings.md"), re.MULTILINE)
    assert row is not None
    assert ast.literal_eval(row[1]) == getattr(conf.Settings(), name)


def test_the_reference_knows_no_other_setting() -> None:
    known = {each.name for each in dataclasses.fields(conf.Settings)}
    first_cells = " ".join(re.findall(r"^\| (`[A-Z].*?) \|", text_of("settings.md"), re.MULTILINE))
    assert set(re.findall(r"`([A-Z_]+)`", first_cells)) == known


def test_263_264_our_column_of_the_defaults_is_what_the_code_has() -> None:
    """The column of our defaults on that page agrees with the code."""
    units = {"": 1, "s": 1, "days": 86400}
    found = {}
    for title, ours in re.findall(
        r"^\| ([^|]*) \| ([^|]*) \|", text_of("defaults.md"), re.MULTILINE
    ):
        if name := re.search(r"`([A-Z_]+)`", f"{title}{ours}"):
            number = re.search(r"(\d[\d.]*) ?(s|days)?", ours)
            found[name[1]] = number and float(number[1]) * units[number[2] or ""]
    defaults = conf.Settings()
    assert {name: value for name, value in found.items() if value is not None} == {
        name: getattr(defaults, name) for name in found if found[name] is not None
    }
    assert {"POLL_INTERVAL", "POLL_BATCH_SIZE", "WORKERS", "LEASE", "MAX_ATTEMPTS"} <= {*found}
    assert (found["RETENTION_DEAD"], defaults.RETENTION_DEAD) == (None, None)


def test_our_column_of_the_defaults_in_words_is_what_the_code_has() -> None:
    ours = dict(re.findall(r"^\| ([^|]*) \| ([^|]*) \|", text_of("defaults.md"), re.MULTILINE))
    defaults, policy = conf.Settings(), retry.Exponential()
    assert ours["pause between them"] == (
        f"{policy.base:g} s, {'doubling' if policy.multiplier == 2 else policy.multiplier} up to "
        f"{policy.cap / 60:g} min, × {policy.jitter[0]:g} to {policy.jitter[1]:g}"
    )
    assert ours["hot, cold queue"] == (
        f"{defaults.HOT_QUEUE_CAPACITY}, {defaults.COLD_QUEUE_CAPACITY}"
    )
    after = {"continue": "the next one", "block": "waits"}[defaults.ON_DEAD]
    assert ours["after a dead event of a key (`ON_DEAD`)"] == after
    assert ours["dead events"] == "kept until a person acts (`RETENTION_DEAD`)"
    assert (defaults.RETRY, defaults.RETENTION_DEAD) == (None, None)
    retried = ours["executions in all (`MAX_ATTEMPTS`)"], defaults.MAX_ATTEMPTS
    assert retried == ("20", 20)


@pytest.mark.parametrize(
    ("name", "cls"), [("exponential", retry.Exponential), ("fixed", retry.Fixed),
                      ("linear", retry.Linear)],
)  # fmt: skip
def test_the_defaults_of_policies_in_the_reference_are_the_codes(name: str, cls: Any) -> None:
    row = re.search(rf'^\| `"{name}"` \| (.*?) \|', text_of("settings.md"), re.MULTILINE)
    assert row is not None
    assert eval(f"cls({', '.join(re.findall('`([^`]+)`', row[1]))})", {"cls": cls}) == cls()


def check_ids() -> set[str]:
    source = "".join(each.read_text() for each in PACKAGE.rglob("*.py"))
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
    for name in COMMANDS:
        assert f"## `{name}`" in text_of("commands.md")


COMMANDS = [each.name for each in pkgutil.iter_modules(commands.__path__)]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_a_command_are_those_of_the_reference(name: str) -> None:
    section = text_of("commands.md").partition(f"## `{name}`\n")[2].partition("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`-.*?) \|", section, re.MULTILINE))
    parser = load_command_class("django_outbox", name).create_parser("manage.py", name)
    plain = BaseCommand().create_parser("manage.py", "any")
    ours = {*parser._option_string_actions} - {*plain._option_string_actions}
    assert {*re.findall(r"--[a-z-]+", rows)} == ours - {"--skip-checks"}


def test_the_arguments_of_write_are_those_of_the_reference() -> None:
    section = text_of("api.md").partition("### `write(")[2].partition("\n### ")[0]
    rows = "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    assert {*re.findall(r"`(\w+)`", rows)} == {*inspect.signature(outbox.write).parameters}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert f"{name}" in text_of("api.md") + text_of("errors.md")


def test_the_reference_knows_no_other_public_name() -> None:
    """Every name of the package in the headings of the reference is exported."""
    chapters = text_of("api.md").partition("## Reading and acting")[0]
    named = re.findall(
        r"`(?:await )?(\w+)", "".join(re.findall(r"^### .*$", chapters, re.MULTILINE))
    )
    errors = re.findall(r"^[├└│─ ]*([A-Z]\w+)", text_of("errors.md"), re.MULTILINE)
    shown = {*named, *re.findall(r"`(\w+)`", chapters.partition("## Errors")[2])}
    assert shown <= {*PUBLIC}
    assert {*PUBLIC} <= {*shown, *errors, *re.findall(r"`(\w+)[(`.]", text_of("api.md"))}


def test_every_name_of_the_test_kit_is_in_the_reference() -> None:
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


# --- the documentation -------------------------------------------------------------------------


def test_506_every_page_is_in_the_index_once() -> None:
    """The links of the index are also the navigation of the site."""
    docs = REFERENCE.parent
    linked = re.findall(
        r"^- \[[^]]+\]\(([a-z/-]+\.md)\)", (docs / "index.md").read_text(), re.MULTILINE
    )
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"index.md"}
    assert sorted(linked) == sorted(pages)


def test_509_every_python_sample_is_run_by_a_test() -> None:
    """A new block on any page, including the README, fails here until a test runs it."""
    runners = [*sample_runners()]
    tutorials = (ROOT / "tests" / "test_tutorial.py").read_text()
    assert [
        (page, title or code.strip())
        for page in samples.pages()
        if f'"{page}"' not in tutorials  # in a tutorial, every block is run as a step
        for title, code in samples.blocks(page).items()
        if not samples.is_of_settings(title, code)  # test_pages reads these
        and not any(aim == page and runs(title, code) for aim, runs in runners)
    ] == []


def sample_runners() -> Iterator[tuple[str, Callable[[str, str], bool]]]:
    """Yield the page of each call of `samples.run` and the like, and which blocks it runs."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        named = {
            each.targets[0].id: each.value
            for each in tree.body
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        }
        for each in ast.walk(tree):
            if (
                isinstance(each, ast.Call)
                and isinstance(each.func, ast.Attribute)
                and ast.unparse(each.func.value) == "samples"
                and each.func.attr in ("run", "modules", "files")
            ):
                page = each.args[0]
                page = named[page.id] if isinstance(page, ast.Name) else page
                only = next((word.value for word in each.keywords if word.arg == "only"), None)
                text = ast.literal_eval(only) if only else ""
                if each.func.attr == "run":
                    yield ast.literal_eval(page), lambda _, code, text=text: text in code
                else:
                    yield ast.literal_eval(page), lambda title, _: bool(samples.FILE.match(title))


# --- the release ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tests", "release"])
def test_a_workflow_asks_for_what_tox_has(name: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    asked = re.findall(r"\btox -e ([\w,]+)$", "\n".join(commands), re.MULTILINE)
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    known = {section.partition("testenv:")[2] for section in tox} | {*databases.OPTIONS}
    assert {each for names in asked for each in names.split(",")} <= known
    assert asked
