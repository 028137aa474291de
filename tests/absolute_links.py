"""``python tests/absolute_links.py FILE REPOSITORY TAG``: make a page's links absolute, in place.

PyPI shows the README without the files that it links to. The release does this before it builds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]*)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """Return the page with its relative links to files of the repository, pictures as raw ones."""

    def link(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return RELATIVE.sub(link, text)


def main(page: str, repository: str, tag: str) -> None:
    path = Path(page)
    path.write_text(absolute(path.read_text(), repository, tag))


if __name__ == "__main__":
    main(*sys.argv[1:])
