"""The site: `make docs` builds it into build/docs, without warnings and without the network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import dcil

project = "dcil"
author = "the dcil authors"
release = version = dcil.__version__
html_title = f"dcil {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    # Ours, in _ext:
    "command_help",
    "docstring_layout",
    "formulas",
    "inline_pictures",
    "repository_links",
    "search_words",
]
exclude_patterns = ["_ext", "_static", "pictures/*.py", "gallery", "**/*.ipynb"]
suppress_warnings = ["config.cache"]  # the gallery's order is a class, which cannot be stored between builds

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_theme_options = {"footer_icons": []}
html_math_renderer = "mathml"
html_search_language = "en"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False
# Prompts and comments stay in what is copied; nothing in the pages has prompts.
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre, div.highlight-Python pre"

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": "/plot_",
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "write_computation_times": False,  # that page loads scripts from elsewhere
    "remove_config_comments": True,
    "image_srcset": ["2x"],
    "abort_on_example_error": True,
}
