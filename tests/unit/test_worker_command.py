"""What ``outbox_worker`` says by itself: what it serves, and under DEBUG each delivery."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from django_outbox.listeners import registry
from django_outbox.management.commands.outbox_worker import banner, log_to_console
from tests.table import PLACED, listening

LOGGER = logging.getLogger("django_outbox")


def test_the_banner_says_what_is_served_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening(lambda event: None, name="mail"):
        text = "\n".join(banner(["default", "other"], ["hooks"], 2.5))
    for part in ("default, other", "hooks", f"{PLACED} mail", "2.5"):
        assert part in text
    assert "default" in "\n".join(banner(["other"], None, None))  # the queue
    monkeypatch.setattr(registry, "listeners", lambda: ())
    assert "listeners.py" in "\n".join(banner(["default"], None, None))


@pytest.mark.parametrize("debug", [True, False])
def test_without_logging_it_shows_whole_tracebacks_under_debug(
    debug: bool, settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.DEBUG = debug
    for name, value in {"handlers": [], "propagate": False, "level": logging.NOTSET}.items():
        monkeypatch.setattr(LOGGER, name, value)  # as in a project without LOGGING
    log_to_console(as_json=False)
    try:
        {}["sku"]
    except KeyError:
        LOGGER.debug("failed", exc_info=True)
    assert ("KeyError: 'sku'" in capsys.readouterr().err) is debug
