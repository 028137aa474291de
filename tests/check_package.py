"""Build sdist and wheel, install the wheel into an empty environment, and put it to use there.

Nothing of the package may have stayed behind; the demo runs, and pytest finds the plugin.

Run by tox in an environment without the package: ``python tests/check_package.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "django_outbox"
# Everything that is not Python is here by kind, so that a kind that vanishes is noticed too.
NEEDED = [
    "py.typed",
    "migrations/0001_initial.py",
    "templates/",
    "static/",
    "contrib/prometheus/alerts.yml",
    "contrib/prometheus/dashboard.json",
    "locale/de/LC_MESSAGES/django.mo",
    "locale/zh_Hans/LC_MESSAGES/django.mo",
]
# Outside the source tree, so that it is the wheel that answers.
SMOKE = """
import django
import django_outbox
from django.conf import settings
from django.core.management import call_command
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django_outbox"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "smoke.sqlite3"}},
)
django.setup()
call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True, verbosity=0)
from django_outbox.models import OutboxEvent
assert OutboxEvent.objects.count() == 0
print("the installed wheel migrates:", django_outbox.__version__)
"""
PLUGIN = """
from importlib.metadata import entry_points
[found] = entry_points(group="pytest11", name="django_outbox")
assert found.value == "django_outbox.pytest_plugin", found
"""
INSTALLED = """
import sysconfig, django_outbox
assert django_outbox.__file__.startswith(sysconfig.get_path("purelib")), django_outbox.__file__
"""
# What a project under any licence may depend on without a thought.
LICENCES = """
from importlib.metadata import distributions
free = ("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "ISC", "Unlicense")
for each in distributions():
    names = [each.metadata["License-Expression"], each.metadata["License"]]
    names += each.metadata.get_all("Classifier") or []
    said = [name for name in names if name and name != "License :: OSI Approved"]
    if each.name != "pip" and not any(word in name for word in free for name in said):
        raise SystemExit(f"{each.name} {each.version}: no licence that we know in {said}")
"""
TEST = """
def test_the_plugin_lends_its_fixture(db, outbox_events):
    assert [*outbox_events] == []
"""


def main() -> None:
    source = {str(path.relative_to(ROOT)) for path in source_files()}
    missing = [need for need in NEEDED if not any(f"{PACKAGE}/{need}" in name for name in source)]
    with tempfile.TemporaryDirectory() as directory:
        wheel, sdist = build(Path(directory))
        for archive, names in ((wheel, wheel_names(wheel)), (sdist, sdist_names(sdist))):
            missing += [f"{name} in {archive.name}" for name in sorted(source - names)]
        if missing:
            sys.exit("missing: " + "\nmissing: ".join(missing))
        if stray := {name for name in wheel_names(wheel) - source if ".dist-info/" not in name}:
            sys.exit(f"in the wheel, and not of the package: {sorted(stray)}")
        use(wheel, Path(directory))
    print(f"{len(source)} files of {PACKAGE} are in wheel and sdist")


def use(wheel: Path, directory: Path) -> None:
    """Do with the wheel what its users do, where the source tree cannot answer in its place."""
    venv.create(directory / "empty", with_pip=True)
    python = directory / "empty" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run("-m", "pip", "install", "--quiet", str(wheel), python=python)
    shutil.copytree(ROOT / "example_project", directory / "example_project")
    for script in (INSTALLED, SMOKE, PLUGIN, LICENCES):
        run("-c", script, cwd=directory, python=python)
    run("-m", "example_project.demo", cwd=directory, python=python)
    run("-m", "pip", "install", "--quiet", "pytest", "pytest-django", python=python)
    (directory / "test_plugin.py").write_text(TEST)
    settings = "example_project.settings"
    run("-m", "pytest", "-q", "--ds", settings, "test_plugin.py", cwd=directory, python=python)


def source_files() -> list[Path]:
    files = (path for path in (ROOT / PACKAGE).rglob("*") if path.is_file())
    return [path for path in files if "__pycache__" not in path.parts]


def build(directory: Path) -> tuple[Path, Path]:
    run("-m", "build", "--outdir", str(directory), str(ROOT))
    return next(directory.glob("*.whl")), next(directory.glob("*.tar.gz"))


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def run(*arguments: str, cwd: Path | None = None, python: str | Path = sys.executable) -> None:
    # What a run of the suite adds to pytest's options is not known in an empty environment.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    if code := subprocess.call([str(python), *arguments], cwd=cwd, env=environment):
        sys.exit(code)


if __name__ == "__main__":
    main()
