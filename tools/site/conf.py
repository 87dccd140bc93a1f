"""Sphinx's settings for the documentation: `make docs`."""

import base64
import hashlib
import re
from pathlib import Path

import furo

_page = (Path(furo.__file__).parent / "theme/furo/base.html").read_text(encoding="utf-8")
_inline = re.findall(r"<script>(.*?)</script>", _page, re.DOTALL)  # the only scripts that the policy of a page names
_hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in _inline)

project = html_title = "heddle"
html_theme = "furo"
html_theme_options = {"navigation_with_keys": False}
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode", "sphinx_copybutton",
    "tools.site.extension",
]  # fmt: skip
root_doc = "README"
smartquotes = viewcode_follow_imported_members = False
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "benchmarks/results/*.md", "api/*.rst"]
suppress_warnings = ["misc.highlighting_failure"]
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False
myst_heading_anchors = 6
default_role = "literal"
autosummary_generate = False
autodoc_default_options = {
    "members": True, "undoc-members": True, "show-inheritance": True, "member-order": "bysource",
    "exclude-members": "model_config, model_post_init",
}  # fmt: skip
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 90
html_math_renderer = "mathml"
html_search_scorer = str(Path(__file__).parent / "scorer.js")  # Sphinx would look for it from where it runs
html_static_path = ["site.css"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_copy_source = html_show_sphinx = html_show_copyright = html_use_index = False
html_context = {"inline_scripts": " ".join(f"'sha256-{each}'" for each in _hashes)}
copybutton_prompt_text = "$ "
