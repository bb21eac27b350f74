"""The executed notebooks and the replays as one static site: `make site`.

nbconvert renders the pages in its own style. A reader's browser loads MathJax for the formulas.
"""

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from grpo_kit.paths import data_dir, make_output_dir, write_atomic

CONTENTS = '<main><p class="jp-RenderedHTMLCommon"><a href="index.html">Contents</a></p>'


def build(notebooks: Path, output: Path) -> list[Path]:
    """Write a page for each notebook of a folder, the first also as index; return their paths.

    The shipped replays are copied beside them. Raises ValueError for a folder without notebooks and
    for a notebook without outputs.
    """
    from grpo_kit.course.runner import find_notebooks

    pages = {path.stem: _page(path) for path in find_notebooks(notebooks)}
    make_output_dir(output / "replays")
    for path in (data_dir() / "replays").glob("*.html"):
        shutil.copy(path, output / "replays")
    for name, page in pages.items():
        write_atomic(output / f"{name}.html", page)
    shutil.copy(output / f"{next(iter(pages))}.html", output / "index.html")
    return [output / f"{name}.html" for name in pages]


def _page(path: Path) -> str:
    """Render one notebook; links to other notebooks and to replays lead to the site's pages."""
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(path, as_version=4)
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise ValueError(f"{path.name} has no outputs: execute it (`grpo-kit notebooks`) first.")
    notebook.cells = [cell for cell in notebook.cells if cell.get("id") != "pip"]  # Colab's
    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    title = notebook.cells[0].source.partition("\n")[0].lstrip("# ")
    page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": title}})
    page = page.replace("<main>", CONTENTS, 1)
    page = re.sub(r'(href="\d\d_\w+)\.ipynb', r"\1.html", page)
    page = page.replace('href="../data/replays/', 'href="replays/')
    return re.sub(r'(?s)<a href="\.\./[^"]*">(.*?)</a>', r"\1 (in the repository)", page)


def main(
    output: Annotated[Path, Argument(help="Folder for the site.")] = Path("runs/site"),
    notebooks: Annotated[Path, Argument(help="Folder of executed notebooks.")] = Path("notebooks"),
) -> None:
    """Build the site."""
    typer.echo(f"site: {build(notebooks, output)[0].with_name('index.html')}")


if __name__ == "__main__":
    typer.run(main)
