"""The text of the engine's statements: a change of it shows in the files of ``statements/``."""

from __future__ import annotations

import pytest

from tests import statements


@pytest.mark.parametrize("server", statements.SERVERS)
def test_a_server_gets_the_statements_that_its_file_shows(server: str) -> None:
    written = (statements.FOLDER / f"{server}.sql").read_text()
    # Without spaces: where lines are broken depends on the version of the formatter.
    assert "".join("".join(statements.sent(server)).split()) == "".join(written.split())
