"""The site works from the file system: formulas, links, and nothing from elsewhere."""

import re
from html import unescape
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from grpo_kit.course.site import build

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def written(folder: Path, name: str, *texts: str, outputs=True) -> None:
    code = new_code_cell("print('<b>')", id="shown")
    if outputs:
        code.outputs = [new_output("stream", name="stdout", text="<b>\n")]
    parameters = new_code_cell("SEED = 0", metadata={"tags": ["parameters"]})
    cells = [*map(new_markdown_cell, texts), parameters, code]
    nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")


def test_formulas_links_and_code_of_a_page(tmp_path):
    first = "# 01 · One\n\nWhat $a_i$ *is*, at `$HOME` for $5 or $6. "
    first += "See [two](02_two.ipynb#Step-1), [source](../grpo_kit/cli.py).\n\n$$x^2 < 3$$"
    written(tmp_path, "01_one", first)
    written(tmp_path, "02_two", "# 02 · Two\n\nMore.\n\n## Step 1\n\nThe word is aardvark.")
    one, two = build(tmp_path, tmp_path / "site")
    page = one.read_text()
    assert page.count("<math ") == 2 and 'display="block"' in page
    assert "<code>$HOME</code>" in page and "for $5 or $6" in page
    assert 'href="02_two.html#Step-1"' in page and 'id="Step-1"' in two.read_text()
    assert "source (in the repository)" in page
    assert "&lt;b&gt;" in page and "<b>\n" not in page
    assert '<a href="02_two.html">02 · Two</a>' in page and 'href="replay_of_01.html"' in page
    assert (tmp_path / "site/index.html").read_text() == page
    assert (tmp_path / "site/replay_of_01.html").is_file()


def test_a_notebook_that_was_not_executed_is_named(tmp_path):
    written(tmp_path, "01_one", "# One", outputs=False)
    with pytest.raises(ValueError, match="01_one.ipynb has no outputs: execute it"):
        build(tmp_path, tmp_path / "site")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> list[Path]:
    return build(NOTEBOOKS, tmp_path_factory.mktemp("site"))


def test_every_link_of_the_course_leads_somewhere_and_nothing_is_loaded(site):
    anchors = {
        page.name: {unescape(name) for name in re.findall(r'\bid="([^"]+)"', page.read_text())}
        for page in site[0].parent.glob("*.html")
    }
    for page in site:
        text = page.read_text()
        loads = r'<(?:img|script|link|iframe)[^>]+(?:src|href)="(?!data:)'
        assert not re.search(loads, text), page.name
        for target in re.findall(r'<a [^>]*?href="([^"]+)"', text):
            if not target.startswith("http"):
                file, _, anchor = unescape(target).partition("#")
                assert (file or page.name) in anchors, f"{page.name}: {target}"
                assert not anchor or anchor in anchors[file or page.name], f"{page.name}: {target}"
        visible = re.sub(r"(?s)<(script|style|code|pre|math)\b.*?</\1>", "", text)
        assert "$$" not in visible and not re.search(r"MATH\d+HTAM", text)
