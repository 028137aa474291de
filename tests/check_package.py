"""Build sdist and wheel, and use the wheel in empty environments as its users do.

Nothing of the package may be missing. On the oldest and the newest Python of this machine, with
the declared dependencies alone, every module is imported, and a new project delivers an event.
An environment with pytest finds the plugin.

Run by tox in an environment of its own: ``python tests/check_package.py``. The interpreters are
those on PATH, of pyenv, and those that ``tests/debian.py`` has unpacked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
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
OLDEST = (3, 10)
# Modules that need an extra; every other module is imported without any.
EXTRAS = {
    "aws": "relays.aws",
    "kafka": "relays.kafka",
    "nats": "relays.nats",
    "opentelemetry": "contrib.opentelemetry",
    "prometheus": "contrib.prometheus",
    "rabbitmq": "relays.rabbitmq",
    "redis": "relays.redis",
    "tasks": "contrib.tasks",  # Django 6 needs no extra
    "webhooks": "relays.http",
}
TEST_KIT = "pytest_plugin"  # pytest is what imports it
IMPORT_ALL = """
import django, importlib, os, pathlib, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "fresh.settings"
django.setup()
import django_outbox
root = pathlib.Path(django_outbox.__file__).parent
files = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
names = {".".join(path.parts).removesuffix(".__init__") for path in files}
only, without = (tuple(f"django_outbox.{each}" for each in part.split()) for part in sys.argv[1:])
for name in sorted(names):
    if name.startswith(only or "django_outbox") and not (without and name.startswith(without)):
        importlib.import_module(name)
"""
LISTENER = """
from pathlib import Path
import django_outbox as outbox

@outbox.listener("order.placed")
def note(event):
    Path("delivered").write_text(event.payload["sku"])
"""
WRITE = """
from django.db import transaction
import django_outbox as outbox
with transaction.atomic():
    outbox.write("order.placed", {"sku": "A-1"})
"""
DELIVER = """
import pathlib, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "manage.py", "outbox_worker"])
until = time.monotonic() + 60
while worker.poll() is None and time.monotonic() < until and not pathlib.Path("delivered").exists():
    time.sleep(0.05)
worker.send_signal(signal.SIGTERM)
sys.exit(worker.wait(60) or pathlib.Path("delivered").read_text() != "A-1")
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
    check_imports()
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


def check_imports() -> None:
    """Fail if the package imports what it does not declare itself."""
    deptry = [sys.executable, "-m", "deptry", str(ROOT / PACKAGE), "--config", "pyproject.toml"]
    done = subprocess.run(deptry, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:  # with a line for each package that is not installed here
        sys.exit("\n".join(line for line in done.stderr.splitlines() if "DEP" in line))


def use(wheel: Path, directory: Path) -> None:
    """Do with the wheel what its users do, where the source tree cannot answer in its place."""
    found = interpreters()
    if len(found) == 1 and os.environ.get("CI"):
        sys.exit(f"only one version of Python was found, {found}; install another that we support")
    with ThreadPoolExecutor(2) as pool:
        parts = [
            pool.submit(use_alone, wheel, directory / ".".join(map(str, version)), found[version])
            for version in sorted({min(found), max(found)})
        ]
        parts.append(pool.submit(use_plugin, wheel, directory))
        for each in parts:
            each.result()


def use_plugin(wheel: Path, directory: Path) -> None:
    """Run a test with the fixture that the wheel's plugin lends."""
    python = environment(directory / "plugin", sys.executable, str(wheel))
    shutil.copytree(ROOT / "example_project", directory / "example_project")
    for script in (INSTALLED, PLUGIN, LICENCES):
        run("-c", script, cwd=directory, python=python)
    uv("pip", "install", "--quiet", "--python", str(python), "pytest", "pytest-django")
    (directory / "test_plugin.py").write_text(TEST)
    settings = "example_project.settings"
    run("-m", "pytest", "-q", "--ds", settings, "test_plugin.py", cwd=directory, python=python)


def use_alone(wheel: Path, directory: Path, interpreter: str) -> None:
    """Import each module, and deliver an event in a new project, with declared packages alone."""
    directory.mkdir()
    python = environment(directory / "alone", interpreter, str(wheel))
    project = new_project(directory, python)
    run("-c", IMPORT_ALL, "", " ".join([*EXTRAS.values(), TEST_KIT]), cwd=project, python=python)
    for command in (["check"], ["migrate", "-v0"], ["makemigrations", "--check", "-v0"]):
        run("-W", "error", "manage.py", *command, cwd=project, python=python)
    run("manage.py", "shell", "-v0", "-c", WRITE, cwd=project, python=python)
    run("-c", DELIVER, cwd=project, python=python)
    for extra, modules in EXTRAS.items():
        if extra == "kafka" and directory.name == "3.15":
            continue  # the client has no wheel for it yet
        python = environment(directory / extra, interpreter, f"{wheel}[{extra}]")
        run("-c", IMPORT_ALL, modules, "", cwd=project, python=python)
    print(f"Python {directory.name}: every module imported, an event delivered")


def new_project(directory: Path, python: Path) -> Path:
    run("-m", "django", "startproject", "fresh", cwd=directory, python=python)
    project = directory / "fresh"
    settings = project / "fresh" / "settings.py"
    settings.write_text(f'{settings.read_text()}\nINSTALLED_APPS += ["django_outbox", "fresh"]\n')
    (project / "fresh" / "listeners.py").write_text(LISTENER)
    return project


def interpreters() -> dict[tuple[int, ...], str]:
    """Return an interpreter for each version of Python that we support and that is here."""
    pyenv = Path(shutil.which("pyenv") or ROOT / "bin/pyenv").resolve().parents[1] / "versions"
    known = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    unpacked = (ROOT / ".tox" / "debian").glob("python-*/root/usr/bin/python3.[0-9][0-9]")
    found = {}
    for each in filter(None, [*known, *pyenv.glob("3.*/bin/python"), *unpacked, sys.executable]):
        asked = [str(each), "-c", "import ssl, sys; print(*sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        version = () if done.returncode else (*map(int, done.stdout.split()),)
        if version >= OLDEST:
            found[version] = str(each)
    return found


def environment(directory: Path, interpreter: str, package: str) -> Path:
    """Make an environment with a package and what it declares; return its interpreter."""
    uv("venv", "--quiet", "--python", interpreter, str(directory))
    python = directory / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    uv("pip", "install", "--quiet", "--python", str(python), package)
    return python


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


def uv(*arguments: str) -> None:
    run("-m", "uv", *arguments)


def run(*arguments: str, cwd: Path | None = None, python: str | Path = sys.executable) -> None:
    # What a run of the suite adds to pytest's options is not known in an empty environment.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    if code := subprocess.call([str(python), *arguments], cwd=cwd, env=env):
        sys.exit(code)


if __name__ == "__main__":
    main()
