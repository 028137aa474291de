"""The house: names, imports, floors, sizes, reference (rows 10, 11, 48, 49, 60, +2, +3)."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import importlib
import inspect
import operator
import pkgutil
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from django.core.management import BaseCommand, load_command_class

import django_outbox as outbox
from django_outbox import conf, exceptions, signals
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
    assert {name for name in users if not name.startswith("dialects")} == {"checks/databases.py"}


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


def test_263_264_our_column_of_the_defaults_is_what_the_code_has() -> None:
    """Rows 263, 264: beside the 2 s and the batch of 10 of others."""
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


def check_ids() -> set[str]:
    source = "".join(each.read_text() for each in (PACKAGE / "checks").glob("*.py"))
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


HEADINGS = re.findall(r"^### .*$", text_of("api.md"), re.MULTILINE)
CALLS = re.findall(r"`([\w.]+)(\([^`…]*\))", "".join(HEADINGS))


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[name for name, _ in CALLS])
def test_the_arguments_of_a_call_are_those_of_the_reference(name: str, arguments: str) -> None:
    [call] = ast.parse(f"def call{arguments}: ...").body
    assert isinstance(call, ast.FunctionDef)
    shown = [each.arg for each in [*call.args.args, *call.args.kwonlyargs]]
    taken = inspect.signature(operator.attrgetter(name)(outbox)).parameters.values()
    assert shown == [each.name for each in taken]
    assert {each.arg for each in call.args.kwonlyargs} == {
        each.name for each in taken if each.kind is each.KEYWORD_ONLY
    }


def test_the_arguments_of_write_are_those_of_the_reference() -> None:
    section = text_of("api.md").partition("### `write(")[2].partition("\n### ")[0]
    rows = "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    assert {*re.findall(r"`(\w+)`", rows)} == {*inspect.signature(outbox.write).parameters}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert f"{name}" in text_of("api.md") + text_of("errors.md")


def test_the_reference_knows_no_other_public_name() -> None:
    """Row +3: what the headings of the reference name of the package itself is exported."""
    chapters = text_of("api.md").partition("## Reading and acting")[0]
    named = re.findall(
        r"`(?:await )?(\w+)", "".join(re.findall(r"^### .*$", chapters, re.MULTILINE))
    )
    errors = re.findall(r"^[├└│─ ]*([A-Z]\w+)", text_of("errors.md"), re.MULTILINE)
    shown = {*named, *re.findall(r"`(\w+)`", chapters.partition("## Errors")[2])}
    assert shown <= {*PUBLIC}
    assert {*PUBLIC} <= {*shown, *errors, *re.findall(r"`(\w+)[(`.]", text_of("api.md"))}


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


# --- the documentation -------------------------------------------------------------------------


def test_506_every_page_is_in_the_index_once() -> None:
    """Its links are also the navigation of the site."""
    docs = REFERENCE.parent
    linked = re.findall(
        r"^- \[[^]]+\]\(([a-z/-]+\.md)\)", (docs / "index.md").read_text(), re.MULTILINE
    )
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"index.md"}
    assert sorted(linked) == sorted(pages)


def test_509_every_python_sample_is_run_by_a_test() -> None:
    """A new block on any page, the README among them, fails here until a test runs it."""
    runners = [*sample_runners()]
    tutorials = (ROOT / "tests" / "test_tutorial.py").read_text()
    assert [
        (page, title or code.strip())
        for page in samples.pages()
        if f'"{page}"' not in tutorials  # there every block is a step
        for title, code in samples.blocks(page).items()
        if not title.startswith("example_project/")  # test_relays compares them with the files
        and not samples.is_of_settings(title, code)  # test_pages reads them
        and not any(aim == page and runs(title, code) for aim, runs in runners)
    ] == []


def sample_runners() -> Iterator[tuple[str, Callable[[str, str], bool]]]:
    """Yield the page of each call of `samples.run` and its like, and which blocks that runs."""
    for path in (ROOT / "tests").glob("test_*.py"):
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
