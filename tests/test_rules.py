"""The rules about the repository's text: each notices a break, and names the file and the line."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from django_outbox import exceptions, testing
from tests.api_entries import Entry
from tests.rules import Rule, api, code, pages, reference, sizes, translations, versions, words

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = "django_outbox/locale/de/LC_MESSAGES/django.po"
SETTINGS = "docs/reference/settings.md"
LONG = "".join(f"    x = {n}\n" for n in range(41))

# A file, a text in it, and what replaces its first occurrence; an empty text is the file's end.
Break = tuple[str, str, str]
BREAKS: list[tuple[Rule, Break]] = [
    (words.words_of_pages, ("README.md", "", "A worker that hears\nof it.\n")),
    (words.words_of_pages, ("docs/how-to/listen.md", "", "Each comes\nof it.\n")),
    (words.words_of_templates, ("django_outbox/templates/admin/x.html", "", "<p>Nobody</p>")),
    (words.words_of_modules, ("django_outbox/conf.py", "", "# somebody has it\n")),
    (words.words_of_modules, ("django_outbox/conf.py", "", 'x = f"{1} stands in for nobody."\n')),
    (words.words_of_modules, ("django_outbox/conf.py", "", 'raise ValueError("Nobody waits.")\n')),
    (code.modules_are_short, ("django_outbox/conf.py", "", "x = 1\n" * 351)),
    (code.functions_are_short, ("django_outbox/conf.py", "", f"def f():\n{LONG}")),
    (code.functions_are_short, ("django_outbox/x.py", "", f"def f():\n{LONG[:120]}\n" * 9000)),
    (sizes.the_package_is_small, ("django_outbox/x.py", "", "x = 1\n" * 25_400)),
    (sizes.the_package_is_small, ("django_outbox/admin/x.py", "", "x = 1\n" * 2_400)),
    (sizes.the_tests_are_small, ("tests/x.py", "", "# long\n" * 74_301)),
    (sizes.the_documentation_is_small, ("docs/x.md", "", "word " * 90_000)),
    (code.modules_say_what_they_are_for, ("django_outbox/x.py", "", "x = 1\n")),
    (code.module_names_say_something, ("django_outbox/worker/utils.py", "", '"""Tools."""\n')),
    (code.sql_is_in_one_package, ("django_outbox/conf.py", "", "c.execute('SELECT 1')\n")),
    (code.files_of_pages_exist, ("CONTRIBUTING.md", "`listeners/retry.py`", "`listeners/no.py`")),
    (
        code.types_and_runtime_have_the_same_names,
        ("django_outbox/__init__.pyi", "from .worker.drain import drain as drain\n", ""),
    ),
    (
        code.types_and_runtime_have_the_same_names,
        ("django_outbox/__init__.py", '"worker.drain": "drain"', '"worker.main": "drain"'),
    ),
    (
        code.types_and_runtime_have_the_same_names,
        ("django_outbox/__init__.py", '    "worker.drain": "drain",\n', ""),
    ),
    (code.runs_are_changed_by_their_owners, ("django_outbox/x.py", "", "lease.run.due = 0.0\n")),
    (code.runs_are_changed_by_their_owners, ("django_outbox/x.py", "", "run.out.clear()\n")),
    (reference.settings_have_a_row, (SETTINGS, "| `LEASE` | `30` |", "| `LEASE` | `31` |")),
    (reference.settings_have_a_row, (SETTINGS, "| `LEASE` | `30` |", "| LEASE | `30` |")),
    (reference.no_other_settings, (SETTINGS, "| `LEASE` |", "| `LEASES` |")),
    (reference.policies_have_their_defaults, (SETTINGS, "`cap=600`", "`cap=60`")),
    (reference.checks_are_listed, ("docs/reference/checks.md", "`django_outbox.E001`", "E001")),
    (reference.checks_are_listed, ("docs/reference/checks.md", "", "`django_outbox.E999`")),
    (reference.signals_are_listed, ("docs/reference/signals.md", "`event_dead`", "event_dead")),
    (reference.columns_are_listed, ("docs/reference/tables.md", "`unique_key`", "unique_key")),
    (
        reference.options_of_commands_are_listed,
        ("docs/reference/commands.md", "| `--reload", "| `--load"),
    ),
    (
        reference.options_of_commands_are_listed,
        ("docs/reference/commands.md", "## `outbox_purge`", "## purge"),
    ),
    (
        reference.arguments_of_write_are_listed,
        ("docs/reference/api.md", "| `on_duplicate` |", "| `duplicates` |"),
    ),
    (
        reference.public_names_are_in_the_reference,
        ("docs/reference/api.md", "### `Fixed(…)`", "### `Regular(…)`"),
    ),
    (
        reference.names_of_the_test_kit_are_listed,
        ("docs/reference/api.md", "- `make_event", "- `create_event"),
    ),
    (api.page_is_up_to_date, ("docs/reference/api.md", "Write one event", "Send one event")),
    (api.lines_have_the_right_width, ("docs/reference/api.md", "", "word " * 25)),
    (pages.index_links_every_page_once, ("docs/how-to/new.md", "", "# New\n")),
    (pages.index_links_every_page_once, ("docs/index.md", "", "- [Again](how-to/listen.md)\n")),
    (pages.index_links_every_page_once, ("docs/index.md", "", "- [New](how-to/new.md)\n")),
    (pages.links_lead_to_files, ("llms.txt", "", "[a](docs/none.md)")),
    (pages.links_lead_to_files, ("README.md", "", "[a](docs/none.md#x)")),
    (
        pages.links_lead_to_files,
        ("pyproject.toml", "", '[project.urls]\nRepository = "https://code.example/outbox"\n'),
    ),
    (
        pages.the_repository_has_an_address,
        ("pyproject.toml", "", '[project.urls]\nHome = "https://code.example"\n'),
    ),
    (pages.llms_has_the_form_of_its_convention, ("llms.txt", "\n\n> ", "\n\n")),
    (pages.llms_has_the_form_of_its_convention, ("llms.txt", "\n## ", "\n# More\n\n## ")),
    (pages.llms_has_the_form_of_its_convention, ("llms.txt", "\n10. **", "\n11. **")),
    (pages.llms_has_the_form_of_its_convention, ("llms.txt", "", "\n## More\n")),
    (pages.llms_has_the_rules_of_the_page, ("llms.txt", "Let failures out", "Catch failures")),
    (pages.one_page_says_how_to_install, ("README.md", "", "It is not on PyPI\nyet.\n")),
    (pages.llms_has_the_form_of_its_convention, ("llms.txt", "", "no link\n")),
    (pages.names_exist, ("README.md", "outbox.write(", "outbox.send(")),
    (pages.names_exist, ("llms.txt", "manage.py outbox_worker", "manage.py outbox_run")),
    (
        pages.workflows_run_what_tox_has,
        (".github/workflows/tests.yml", "tox -e check,", "tox -e chek,"),
    ),
    (
        translations.every_text_is_translated,
        ("django_outbox/conf.py", "", 'x = _("never translated")\n'),
    ),
    (translations.every_text_is_translated, (CATALOGUE, "", '\nmsgid "more"\nmsgstr "mehr"\n')),
    (translations.every_text_is_translated, (CATALOGUE, "", '\nmsgid "more"\nmsgstr ""\n')),
    (translations.every_text_is_translated, (CATALOGUE, "\nmsgid", "\n#, fuzzy\nmsgid")),
    (translations.every_text_is_translated, (CATALOGUE, "", '\n#~ msgid "o"\n#~ msgstr "a"\n')),
    (
        translations.translations_have_the_placeholders,
        (CATALOGUE, "", '\nmsgid "%(a)s"\nmsgstr "%(b)s"\n'),
    ),
    (
        translations.translations_have_the_placeholders,
        (CATALOGUE, "", '\nmsgid "a "\nmsgstr "a"\n'),
    ),
    (translations.catalogues_are_well_formed, (CATALOGUE, "nplurals=2", "nplurals=1")),
    (
        translations.compiled_catalogues_are_those_of_the_sources,
        (CATALOGUE, "", '\nmsgid "more"\nmsgstr "mehr"\n'),
    ),
    (translations.catalogues_do_not_change_by_themselves, (CATALOGUE, "", "\n#: conf.py:1\n")),
    (
        translations.catalogues_do_not_change_by_themselves,
        ("django_outbox/locale/fr/LC_MESSAGES/django.po", "", ""),
    ),
    (
        versions.page_shows_the_runs,
        ("docs/reference/supported-versions.md", "| 3.10 | 5.2 |", "| 3.10 | 5.1 |"),
    ),
    (
        versions.page_claims_what_is_run,
        ("docs/reference/supported-versions.md", "| 3.10 to 3.15 |", "| 3.9 to 3.15 |"),
    ),
    (versions.no_version_is_left_out, ("tox.ini", "-postgres17", "-sqlite")),
    (
        versions.no_version_is_left_out,
        ("tox.ini", "py315-django61-postgres", "py315-django61-mysql"),
    ),
    (versions.classifiers_name_what_is_run, ("pyproject.toml", "Django :: 6.1", "Django :: 6.2")),
    (versions.readme_names_what_is_run, ("README.md", "Python 3.10 to", "Python 3.9 to")),
]
RULES = [
    rule
    for module in (api, code, pages, reference, sizes, translations, versions, words)
    for rule in module.RULES
]


# Files whose text a break is in, or which the text of another is compared with. All others of
# their kind are empty in the copy, so that a rule reads them at once.
WHOLE = {f"django_outbox/{each}.py" for each in ("__init__", "conf", "delivery/lease")}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a copy of the files that rules read."""
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "llms.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tox.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "_build", "images", "static")
    for name in ("docs", "django_outbox", ".github", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for path in tmp_path.rglob("*.py"):
        name = path.relative_to(tmp_path).as_posix()
        if name not in WHOLE and "/checks/" not in name:
            path.write_text("")
    return tmp_path


def broken(repository: Path, name: str, old: str, new: str, rule: Rule) -> set[str]:
    """Return what a rule says while a file is broken; then restore the file."""
    path = repository / name
    kept = path.read_text() if path.exists() else None
    text = kept or ""
    assert old in text, f"{name} has no {old!r}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, new, 1) if old else text + new)
    try:
        return {*rule(repository)}
    finally:
        if kept is None:
            path.unlink()
        else:
            path.write_text(kept)


def test_each_rule_notices_what_breaks_it(repository: Path) -> None:
    before = {rule: {*rule(repository)} for rule in {rule for rule, _ in BREAKS}}
    assert [
        (rule.__name__, *each)
        for rule, each in BREAKS
        if not broken(repository, *each, rule) - before[rule]
    ] == []


def test_a_fault_names_the_line(repository: Path) -> None:
    lines = len((ROOT / "README.md").read_text().splitlines())
    page = "A worker that hears\nof it\n"
    faults = broken(repository, "README.md", "", page, words.words_of_pages)
    assert [each.partition(" ")[0] for each in faults] == [f"README.md:{lines + 1}:"]
    module = 'def f():\n    """A b.\n\n    No\n    one."""\n'
    faults = broken(repository, "django_outbox/x.py", "", module, words.words_of_modules)
    assert [each.partition(" ")[0] for each in faults] == ["django_outbox/x.py:4:"]


def test_code_is_not_searched_for_words(repository: Path) -> None:
    page = "Call `ear()`, or\n\n```python\nclass Ear: ...\n```\n"
    assert not broken(repository, "README.md", "", page, words.words_of_pages)
    module = 'METHODS = ("ring", "ear")\nraise ValueError("Expected ring(connection) and ear().")\n'
    assert not broken(repository, "django_outbox/x.py", "", module, words.words_of_modules)


# --- rules that read the package itself ----------------------------------------------------------


def test_an_error_that_is_not_exported_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = type("Extra", (Exception,), {"__module__": exceptions.__name__})
    monkeypatch.setattr(exceptions, "Extra", extra, raising=False)
    assert [*reference.errors_are_public(ROOT)]


def test_a_name_without_a_docstring_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing.make_event, "__doc__", " ")
    assert [*reference.public_names_have_docstrings(ROOT)]


def test_a_name_without_an_entry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [*api.public_names_have_an_entry(ROOT)]
    for path in ("django_outbox:write", "django_outbox.contrib.logs:context"):
        with monkeypatch.context() as patch:
            patch.setattr(api, "ENTRIES", [each for each in api.ENTRIES if each.path != path])
            [fault] = api.public_names_have_an_entry(ROOT)
            assert path in fault


def test_a_signal_without_an_entry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    [chapter] = api.CHAPTERS["signals"]
    fewer = replace(chapter, text=chapter.text.replace("``event_dead``", "it"))
    monkeypatch.setitem(api.CHAPTERS, "signals", [fewer])
    assert [*api.signals_are_named(ROOT)]


def test_an_entry_that_is_not_complete_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Entry(path="tests.rules:Text", heading="Text", example="x = 1", methods=("fault",))
    undocumented = replace(whole, methods=("read",))
    backticks = replace(whole, text="It is ``it` and ``that``.")
    for entry in (whole, replace(whole, example=""), backticks, undocumented):
        monkeypatch.setattr(api, "ENTRIES", [entry])
        assert len([*api.entries_are_complete(ROOT)]) == (entry is not whole), entry


def test_every_rule_is_seen_to_fail() -> None:
    """A rule that reads the package has a test of its own above."""
    of_the_package = {
        reference.errors_are_public,
        reference.public_names_have_docstrings,
        api.public_names_have_an_entry,
        api.signals_are_named,
        api.entries_are_complete,
    }
    assert {rule for rule, _ in BREAKS} | of_the_package == {*RULES}
