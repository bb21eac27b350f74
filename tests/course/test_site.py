"""The site: links lead to its pages, and what was not executed is named."""

import re
from html import unescape
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from grpo_kit.course.site import build

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def test_a_notebook_that_was_not_executed_is_named(tmp_path):
    parameters = new_code_cell("SEED = 0", metadata={"tags": ["parameters"]})
    cells = [new_markdown_cell("# One"), parameters]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_one.ipynb")
    with pytest.raises(ValueError, match="01_one.ipynb has no outputs: execute it"):
        build(tmp_path, tmp_path / "site")


@pytest.mark.slow
def test_every_link_of_the_course_leads_to_a_page_and_to_a_heading_of_it(tmp_path):
    pages = {page.name: page.read_text() for page in build(NOTEBOOKS, tmp_path)}
    assert (tmp_path / "index.html").read_text() == pages["00_start_here.html"]
    assert "<title>01 · Basic GRPO" in pages["01_basic_grpo.html"]
    for name, text in pages.items():
        for target in re.findall(r'<a [^>]*?href="([^"]+)"', text):
            if not target.startswith("http"):
                file, _, anchor = unescape(target).partition("#")
                assert not file or (tmp_path / file).is_file(), f"{name}: {target}"
                page = unescape(pages.get(file or name, ""))
                assert not anchor or f'id="{anchor}"' in page, f"{name}: {target}"
    assert all("replays/" in pages[name] for name in ("01_basic_grpo.html", "06_flow_grpo.html"))
