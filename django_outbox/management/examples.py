"""Base class of our management commands: ``--help`` ends with examples that can be pasted."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.core.management.base import BaseCommand, DjangoHelpFormatter

TITLE: Final = "Examples:"


class _HelpFormatter(DjangoHelpFormatter):
    """Wraps the description, and keeps the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(TITLE) else super()._fill_text(text, width, indent)


class ExampleCommand(BaseCommand):
    """A command with examples: its arguments, and what they do."""

    examples: ClassVar[dict[str, str]]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        lines = [
            f"  # {text}\n  manage.py {subcommand} {arguments}".rstrip()
            for arguments, text in self.examples.items()
        ]
        given = {"epilog": "\n".join([TITLE, *lines]), "formatter_class": _HelpFormatter}
        return super().create_parser(prog_name, subcommand, **given, **kwargs)
