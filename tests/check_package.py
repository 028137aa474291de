"""Build sdist and wheel, install the wheel, and see that nothing of the package stayed behind.

Run by tox in an environment without the package: ``python tests/check_package.py``.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "django_outbox"
# Everything that is not Python is here by kind, so that a kind that vanishes is noticed too.
NEEDED = ["py.typed", "migrations/0001_initial.py", "templates/", "static/"]
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


def main() -> None:
    source = {str(path.relative_to(ROOT)) for path in source_files()}
    missing = [need for need in NEEDED if not any(f"{PACKAGE}/{need}" in name for name in source)]
    with tempfile.TemporaryDirectory() as directory:
        wheel, sdist = build(Path(directory))
        for archive, names in ((wheel, wheel_names(wheel)), (sdist, sdist_names(sdist))):
            missing += [f"{name} in {archive.name}" for name in sorted(source - names)]
        if missing:
            sys.exit("missing: " + "\nmissing: ".join(missing))
        run("-m", "pip", "install", "--quiet", str(wheel))
        # Again by force: an earlier build of the same version would satisfy the line above.
        run("-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
        run("-c", SMOKE, cwd=directory)
    print(f"{len(source)} files of {PACKAGE} are in wheel and sdist")


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


def run(*arguments: str, cwd: str | None = None) -> None:
    if code := subprocess.call([sys.executable, *arguments], cwd=cwd):
        sys.exit(code)


if __name__ == "__main__":
    main()
