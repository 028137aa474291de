"""``python -m tests.benchmarks.alone PART FILE``: one part on one database, in its own process.

The scale comes as JSON on standard input; figures, or the error, go as JSON to the file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import django

from .scale import Scale
from .witness import VARIABLE


def main(part: str, scale: Scale) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory:
        path = Path(directory) / "witness"
        os.environ[VARIABLE] = str(path)
        django.setup()

        from django.test.utils import setup_databases, teardown_databases

        from . import machine
        from .witness import Witness

        made = setup_databases(verbosity=0, interactive=False)
        try:
            server = machine.server()
            figures = import_module(f"tests.benchmarks.{part}").run(scale, Witness(path))
        finally:
            teardown_databases(made, verbosity=0)
    return {"server": server, "figures": [figure.as_dict() for figure in figures]}


if __name__ == "__main__":
    try:
        found = main(sys.argv[1], Scale(**json.load(sys.stdin)))
    except Exception as error:  # noqa: BLE001 - the other parts go on
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    Path(sys.argv[2]).write_text(json.dumps(found))
