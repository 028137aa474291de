#!/usr/bin/env python
"""Run Django's commands for the example project, from any directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    # Started by its path, Python would look for modules beside this file only.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
