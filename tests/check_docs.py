"""Build the documentation, and follow every link of it that needs no network.

Run by ``tox -e check``: ``python tests/check_docs.py [DIRECTORY FOR THE SITE]``. Three things fail:
a warning of Sphinx, a link to nothing, on the site or on the repository's own pages, and a page of
the site that would load anything from another host.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


def main() -> None:
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "_build" / "html"
    build(site)
    pages = {page: Page(page) for page in sorted(site.rglob("*.html"))}
    markdown = [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / ".github").rglob("*.md")),
        *DOCS.rglob("*.md"),
    ]
    faults = [*faults_of_markdown(markdown), *faults_of_site(site, pages)]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(pages)} pages built; the links of {len(markdown)} Markdown files lead somewhere")


def build(site: Path) -> None:
    """Build from nothing, so that no warning hides behind what was built before."""
    command = ["-m", "sphinx", "-W", "--keep-going", "-n", "-E", "-a", "-q", "-b", "html"]
    if code := subprocess.call([sys.executable, *command, str(DOCS), str(site)]):
        sys.exit(code)


# --- the Markdown, as the repository shows it ----------------------------------------------------


def faults_of_markdown(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        for target in links(path):
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            aim = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not aim.exists():
                yield f"{path.relative_to(ROOT)}: {target} leads to no file"
            elif url.fragment and aim.suffix == ".md" and url.fragment not in headings(aim):
                yield f"{path.relative_to(ROOT)}: {target} leads to no heading"


@cache
def tokens(path: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8"))


def links(path: Path) -> Iterator[str]:
    for block in tokens(path):
        for each in block.children or ():
            if target := each.attrGet("href") or each.attrGet("src"):
                yield str(target)


@cache
def headings(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    blocks = tokens(path)
    titles = (
        "".join(each.content for each in inline.children or () if each.type != "image")
        for block, inline in itertools.pairwise(blocks)
        if block.type == "heading_open"
    )
    found: set[str] = set()
    for title in titles:
        anchor = re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", title).lower())
        anchor = anchor.strip().replace(" ", "-")
        number = sum(each.rpartition("-")[0] == anchor or each == anchor for each in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


# --- the site ------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page of the site links to, what it loads, and the anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif given.get(LOADED.get(tag, "")):
            self.loaded.append(given[LOADED[tag]])


def faults_of_site(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        where = path.relative_to(site)
        for target in page.loaded:
            if urlsplit(target).netloc:
                yield f"{where}: loads {target} from another host"
        for target in page.links:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            aim = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not aim.exists():
                yield f"{where}: {target} leads to no file"
            elif aim in pages and unquote(url.fragment) not in pages[aim].anchors:
                yield f"{where}: {target} leads to no anchor"
    for sheet in site.rglob("*.css"):
        if found := re.search(
            r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]+", sheet.read_text()
        ):
            yield f"{sheet.relative_to(site)}: loads {found[0]} from another host"


if __name__ == "__main__":
    main()
