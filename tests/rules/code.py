"""Rules about the package's modules: their names, sizes and docstrings, and where SQL is."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.rules import Rule, Text, modules

MODULE_LINES = 350
FUNCTION_LINES = 40  # of its body, without the docstring
MEDIAN_LINES = 10  # of all functions
VAGUE = set(
    "utils util helpers helper common manager managers service services handlers jobs".split()
)
# Modules outside ``sql`` that run SQL of their own: the check of SQLite's journal mode.
WITH_SQL = {
    "django_outbox/checks/databases.py",
    "django_outbox/relays/redis.py",
}  # Redis, too, executes
SQL = re.compile(r"\.execute\(|RawSQL|\.raw\(|\.extra\(")
LIST_CHANGES = {"append", "clear", "extend", "insert", "pop", "remove"}
RUN = re.compile(r"\b(run|known)$")  # how an expression ends whose value is a ``Run``
FILE = re.compile(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.py)?)`")


def modules_are_short(root: Path) -> Iterator[str]:
    for module in modules(root):
        if (lines := len(module.text.splitlines())) > MODULE_LINES:
            yield f"{module.path}:{lines}: more than {MODULE_LINES} lines; split it by its jobs"


def functions_are_short(root: Path) -> Iterator[str]:
    found = [(module, *each) for module in modules(root) for each in functions(module)]
    for module, function, lines in found:
        if lines > FUNCTION_LINES:
            yield (
                f"{module.path}:{function.lineno}: {function.name} has {lines} lines, more than "
                f"{FUNCTION_LINES}; split it"
            )
    if (median := statistics.median(lines for *_, lines in found)) >= MEDIAN_LINES:
        yield f"django_outbox:1: the median function has {median} lines; keep it below 10"


def functions(module: Text) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Yield every function with the number of lines of its body, without its docstring."""
    for each in ast.walk(ast.parse(module.text)):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            body = each.body[1:] if ast.get_docstring(each) else each.body
            yield each, (each.end_lineno or 0) - body[0].lineno + 1 if body else 0


def modules_say_what_they_are_for(root: Path) -> Iterator[str]:
    for module in modules(root):
        if module.text and not ast.get_docstring(ast.parse(module.text)):
            yield f"{module.path}:1: no docstring; say what the module is for"


def module_names_say_something(root: Path) -> Iterator[str]:
    for module in modules(root):
        for part in set(Path(module.path).with_suffix("").parts) & VAGUE:
            yield f"{module.path}:1: {part!r} could be the name of anything; name its purpose"


def sql_is_in_one_package(root: Path) -> Iterator[str]:
    for module in modules(root):
        if not module.path.startswith("django_outbox/sql/") and module.path not in WITH_SQL:
            for found in SQL.finditer(module.text):
                yield module.fault(found.start(), "SQL outside django_outbox/sql; move it there")


def files_of_pages_exist(root: Path) -> Iterator[str]:
    """Every file that the two pages about the source name exists."""
    for path in ("CONTRIBUTING.md", "docs/explanation/model.md"):
        page = Text.read(root, path)
        found = [*FILE.finditer(page.text)]
        if len(found) <= 20:
            yield page.fault(0, "names hardly any file; does tests/rules/code.py still read it?")
        for each in found:
            if not any((parent / each[1]).exists() for parent in (root / "django_outbox", root)):
                yield page.fault(each.start(), f"{each[1]} does not exist; correct the path")


def types_and_runtime_have_the_same_names(root: Path) -> Iterator[str]:
    """The imports of ``__init__.pyi`` and ``_MODULES`` agree."""
    stub = Text.read(root, "django_outbox/__init__.pyi")
    imports = [each for each in ast.parse(stub.text).body if isinstance(each, ast.ImportFrom)]
    typed = {alias.name: each.module for each in imports for alias in each.names}
    package = Text.read(root, "django_outbox/__init__.py")
    loaded = next(
        each
        for each in ast.parse(package.text).body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "_MODULES"
    )
    modules = ast.literal_eval(loaded.value)
    runtime = {name: module for module, names in modules.items() for name in names.split()}
    for name in sorted({**typed, **runtime}):
        if typed.get(name) != runtime.get(name):  # a module itself comes from none, and is in none
            yield (
                f"{package.path}:{loaded.lineno}: {name} comes from {runtime.get(name)} here, but "
                f"from {typed.get(name)} in {stub.path}; correct one"
            )


def runs_are_changed_by_their_owners(root: Path) -> Iterator[str]:
    """Each field of ``Run`` is assigned in the module that the comment above it names, if any."""
    lease = Text.read(root, "django_outbox/delivery/lease.py")
    body = re.search(r"^class Run\(.*?^    @property", lease.text, re.DOTALL | re.MULTILINE)
    assert body is not None
    owners, owner = dict[str, str](), ""
    for line in body[0].splitlines():
        if line.startswith("    # "):
            owner = (re.findall(r"worker/\w+\.py", line) or [""])[0]
        elif field := re.match(r"    (\w+): ", line):
            owners[field[1]] = f"django_outbox/{owner}"
    for module in modules(root):
        for run, field, line in changes(module):
            known = field in owners and RUN.search(run)
            if known and owners[field] != module.path and module.path != lease.path:
                yield f"{module.path}:{line}: {field} of a run; it belongs to {owners[field]}"


def changes(module: Text) -> Iterator[tuple[str, str, int]]:
    """Yield what is assigned to or changed as a list: the object, its attribute and the line."""
    for each in ast.walk(ast.parse(module.text)):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            changed = each.func.value if each.func.attr in LIST_CHANGES else None
        else:
            changed = each if isinstance(getattr(each, "ctx", None), ast.Store) else None
        if isinstance(changed, ast.Attribute):
            yield ast.unparse(changed.value), changed.attr, changed.lineno


RULES: list[Rule] = [
    modules_are_short,
    functions_are_short,
    modules_say_what_they_are_for,
    module_names_say_something,
    sql_is_in_one_package,
    files_of_pages_exist,
    types_and_runtime_have_the_same_names,
    runs_are_changed_by_their_owners,
]
