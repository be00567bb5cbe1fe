"""Search finds "2:4", which Sphinx splits into two numbers and ignores, and "FSDP" where a page says FSDP2."""

from __future__ import annotations

import re

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish


class SearchRatios(SearchEnglish):
    """English, in which N:M is a word, and a name with a number at its end is also found without it."""

    _numbered = re.compile(r"([A-Za-z]{3,})\d+$")
    _word_re = re.compile(r"\d+:\d+|\w+")
    js_splitter_code = r"""
var splitQuery = (query) =>
  query.match(/\d+:\d+|[\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu) || [];
"""

    def split(self, text: str) -> list[str]:
        words = super().split(text)
        return words + [match[1] for match in map(self._numbered.match, words) if match]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_search_language(SearchRatios)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
