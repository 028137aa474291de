"""``python -m tests.rules``: check every rule, print each violation, and exit with 1 if any."""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.conf import settings


def main() -> None:
    settings.configure(
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django_outbox",
        ]
    )
    django.setup()

    from tests.rules import api, code, pages, reference, sizes, translations, versions, words

    root = Path(__file__).resolve().parents[2]
    sys.stdout.write("\n".join([*sizes.report(root), ""]))
    rules = [
        rule
        for module in (api, code, pages, reference, sizes, translations, versions, words)
        for rule in module.RULES
    ]
    if violations := [line for rule in rules for line in rule(root)]:
        sys.exit("\n".join([*violations, f"{len(violations)} violations of {len(rules)} rules"]))
    sys.stdout.write(f"{len(rules)} rules are kept\n")


if __name__ == "__main__":
    main()
