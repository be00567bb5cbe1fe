"""SVG pictures of docs/pictures become part of the page, so that they take its colours, light and dark."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform


class InlinePictures(SphinxPostTransform):
    """Replaces images of docs/pictures in HTML pages."""

    default_priority = 5  # before the images are collected to be copied
    formats = ("html",)

    def run(self, **kwargs: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            if "pictures/" in image["uri"] and image["uri"].endswith(".svg"):
                svg = (Path(self.env.srcdir) / image["uri"]).read_text()
                svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.S)  # site.css has it for both themes
                label = escape(image.get("alt", ""), quote=True)
                svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
                image.replace_self(nodes.raw("", f'<span class="picture">{svg}</span>', format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(InlinePictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
