"""Links in Markdown are those of the repository; here they become links of the site.

Pages outside of docs/ that others link to have a page in docs/project that includes them. Other files are offered for
download; folders, which a site does not have, lose their link and keep its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
#: File of the repository -> its page.
PAGES = {
    "ARCHITECTURE.md": "docs/project/architecture.md",
    "CHANGELOG.md": "docs/project/changes.md",
    "CONTRIBUTING.md": "docs/project/contributing.md",
    "SECURITY.md": "docs/project/security.md",
    "benchmarks/CPU.md": "docs/project/cpu-benchmarks.md",
    "benchmarks/NOTES.md": "docs/project/training-benchmarks.md",
    "packages/dcil-runtime/README.md": "docs/project/runtime.md",
    "packages/dcil-runtime/native/README.md": "docs/project/native.md",
    "README.md": "docs/index.md",
    "docs/results.html": "docs/results.md",
    **{f"examples/{file.name}": "docs/examples.md" for file in (ROOT / "examples").glob("*.py")},
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def rewrite(text: str, source: Path, page: Path) -> str:
    """Return ``text`` of the file ``source`` with the links that it must have on ``page``."""

    def link(match: re.Match[str]) -> str:
        mark, words, path, anchor = match.groups()
        target = Path(os.path.normpath(source.parent / path))
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        if target.is_dir():
            return words
        name = str(target.relative_to(ROOT))
        anchor = anchor or ("#" + target.stem.replace("_", "-") + "-py" if name.startswith("examples/") else "")
        target = ROOT / PAGES.get(name, name)
        return f"{mark}[{words}]({os.path.relpath(target, page.parent)}{anchor})"

    return LINK.sub(link, text)


def read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Rewrite the links of a Markdown page; an included page comes with its own."""
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md":
        content[0] = rewrite(content[0], page, page)


def include(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    if Path(path).suffix == ".md":
        file, page = (ROOT / "docs" / path).resolve(), Path(app.env.doc2path(app.env.docname))
        content[0] = rewrite(content[0], file, page)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("include-read", include)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
