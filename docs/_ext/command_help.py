"""The directive `dcil-help`: what a command prints for --help, so that the page cannot differ from the program."""

from __future__ import annotations

import contextlib
import io
import os
from typing import ClassVar
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dcil.cli import main


def help_of(words: list[str]) -> str:
    """Return the help text of a command, 96 columns wide."""
    out = io.StringIO()
    size = mock.patch.dict(os.environ, {"COLUMNS": "96", "NO_COLOR": "1"})
    with size, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue().rstrip()


class Help(SphinxDirective):
    """```{dcil-help} train```"""

    optional_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, object]] = {}

    def run(self) -> list[nodes.Node]:
        text = help_of(self.arguments[0].split() if self.arguments else [])
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("dcil-help", Help)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
