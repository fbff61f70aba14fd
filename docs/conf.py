"""Sphinx's settings for the documentation: `make docs`, or `sphinx-build docs docs/_build/html`.

The pages are Markdown (MyST). Those of the lessons, of the files in the root of the repository and the references are
written from their sources when Sphinx starts (extension/pages.py) and are not in git.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
# The kernels that run the lessons: this clone's heedful; one thread each, since two of them run at once.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Their settings, not those of the user: no warning that they talk without encryption, which is inside this machine; a
# figure is shown as a picture also before pyplot has made one.
os.environ["IPYTHONDIR"] = str(HERE / "_build" / "ipython")
PROFILE = HERE / "_build" / "ipython" / "profile_default"
PROFILE.mkdir(parents=True, exist_ok=True)
SETTINGS = "c.IPKernelApp.log_level = 40\nc.IPKernelApp.matplotlib = 'inline'\n"
(PROFILE / "ipython_kernel_config.py").write_text(SETTINGS, encoding="utf-8")

from heedful import __version__  # noqa: E402

project = "heedful"
author = "The heedful authors"
copyright = "The heedful authors, Apache-2.0"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_design", "extension"]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build", "extension", "static", "images", "**.ipynb_checkpoints"]
nitpicky = False
default_role = "code"  # `name` in our docstrings
toc_object_entries = False

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

nb_execution_mode = os.environ.get("HEEDFUL_LESSONS", "cache")  # "off": the pages without what their cells print
nb_execution_cache_path = str(HERE / "_build" / "lessons")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_number_source_lines = False
nb_ipywidgets_js = {}  # nothing from other hosts
nb_code_prompt_show = "Show the solution"  # nothing else is hidden
nb_code_prompt_hide = "Hide the solution"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = "heedful"
html_static_path = ["static"]
html_css_files = ["heedful.css"]
html_js_files = ["playground.js"]
html_favicon = "static/icon.svg"
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#a8432d", "color-brand-content": "#a8432d"},
    "dark_css_variables": {"color-brand-primary": "#e58a74", "color-brand-content": "#e58a74"},
}
pygments_style = "friendly"
pygments_dark_style = "monokai"
