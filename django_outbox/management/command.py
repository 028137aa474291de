"""Base of our management commands: examples in ``--help``, and output."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final

from django.core.management.base import BaseCommand, DjangoHelpFormatter, OutputWrapper

from ..inspection.sentences import precise

INTERRUPTED: Final = 130  # exit code, as shells report Ctrl-C
PIPE_CLOSED: Final = 141  # exit code, as shells report SIGPIPE
TITLE: Final = "Examples:"
ESCAPED: Final = "django_outbox_escaped"  # name of the handler of errors below


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Write what a terminal's encoding lacks as JSON does, so that JSON stays JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(ESCAPED, _escaped)


class _HelpFormatter(DjangoHelpFormatter):
    """Wraps the description, and keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(TITLE) else super()._fill_text(text, width, indent)


class OutboxCommand(BaseCommand):
    """A command with examples: its arguments, and what they do."""

    examples: ClassVar[dict[str, str]]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        lines = [
            f"  # {text}\n  manage.py {subcommand} {arguments}".rstrip()
            for arguments, text in self.examples.items()
        ]
        given = {"epilog": "\n".join([TITLE, *lines]), "formatter_class": _HelpFormatter}
        return super().create_parser(prog_name, subcommand, **given, **kwargs)

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        return {"databases": []}  # otherwise Django 6.1 queries every MySQL server

    def run_from_argv(self, argv: list[str]) -> None:
        """Run in a shell, whose terminal may know only ASCII, and whose pipes may be closed."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # the process was started without it
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open to the end
                setattr(self, name, OutputWrapper(getattr(sys, name)))
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=ESCAPED)
        try:
            super().run_from_argv(argv)
            sys.stdout.flush()
        except BrokenPipeError:  # its reader has ended, such as head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed at exit
            sys.exit(PIPE_CLOSED)

    def print(self, form: str, report: Any, lines: Iterable[str]) -> None:
        """Print what was found for people (``table``) or programs (``json``, or ``line``).

        On a terminal, lines that tell of a problem are red.
        """
        if form == "table":
            marked = (self.style.ERROR(each) if each.startswith("!") else each for each in lines)
            self.stdout.write("\n".join(marked))
        else:
            self.stdout.write(as_json(report, indent=2 if form == "json" else None))


def as_json(report: Any, *, indent: int | None = None) -> str:
    """Return JSON; datetimes become ISO 8601."""
    return json.dumps(report, indent=indent, ensure_ascii=False, default=datetime.isoformat)


def text_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a report as people read it: lists of rows as tables, and the databases at its end."""
    for name, value in report.items():
        title = name.replace("_", " ")
        if name == "problems":
            yield from (f"{'!' if each.get('is_bad') else '-'} {each['text']}" for each in value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from ("", f"{title}:", *table(value))
        elif name == "databases":
            for alias, answer in value.items():
                yield from ("", f"[{alias}]", *text_lines(answer))
        else:
            yield f"{title:16}{cell(value)}"


def table(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> Iterator[str]:
    """Yield the rows of a report as lines, under the names of their keys, or of ``names``."""
    if rows:
        keys = names or [*rows[0]]
        lines = [[key.replace("_", " ").upper() for key in keys]]
        lines += [[cell(row[key]) for key in keys] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            yield "  ".join(cells).rstrip()


def cell(value: Any) -> str:
    """Return a value as people read it, on one line; ``-`` for an empty one."""
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, float):
        return precise(value)
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return "-" if value is None else " ".join(str(value).split()) or "-"
