"""Mutants and survivors: what each replaces is still there, and what results is Python."""

from __future__ import annotations

import re
from pathlib import Path

import django_outbox
from tests.cases import cases
from tests.faults.mutants import MUTANTS, REPOSITORY, Patch, edited
from tests.simulation.safeguards import OWN
from tests.survivors import SURVIVORS, Survivor

PACKAGE = Path(django_outbox.__file__).parent


def named(patch: Patch) -> str:
    return patch.name


@cases("patch", [*MUTANTS, *OWN, *SURVIVORS], ids=named)
def test_every_patch_still_finds_what_it_takes_away(patch: Patch) -> None:
    texts = edited(patch, PACKAGE)
    for name, text in texts.items():
        compile(text, name, "exec")
    assert all(new in texts[name] for name, _, new in patch.edits)


@cases("survivor", SURVIVORS, ids=named)
def test_every_survivor_names_a_test(survivor: Survivor) -> None:
    path, function = survivor.test.partition("[")[0].split("::")
    assert re.search(rf"^def {function}\(", (REPOSITORY / path).read_text(), re.MULTILINE)
