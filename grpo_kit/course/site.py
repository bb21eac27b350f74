"""The executed notebooks and the replays as one static site: `make site`.

nbconvert renders the notebooks, latex2mathml their formulas, so that a page needs no network. Each
page has the contents at its top.
"""

import re
import shutil
from pathlib import Path
from typing import Annotated

import jinja2
import typer
from markupsafe import Markup
from typer import Argument

from grpo_kit.paths import data_dir, make_output_dir, write_atomic

MATH = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\\\w$])\$(?P<inline>[^\s$](?:[^$]*[^\s$])?)\$(?!\d)", re.S
)
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)


def build(notebooks: Path, output: Path) -> list[Path]:
    """Write a page for each notebook of a folder, the first also as index; return their paths.

    The contents name the shipped replays, too. Raises ValueError for a folder without notebooks and
    for a notebook without outputs.
    """
    from pygments.formatters import HtmlFormatter

    from grpo_kit.course.runner import find_notebooks

    bodies = {path.stem: _body(path) for path in find_notebooks(notebooks)}
    make_output_dir(output)
    contents = {}
    for name, body in bodies.items():
        title = re.search(r"<h1[^>]*>(.*?)<a class=\"anchor-link\"", body, re.S)
        contents[f"{name}.html"] = Markup(title[1] if title else name)
    for path in sorted((data_dir() / "replays").glob("*.html")):
        name = f"replay_of_{path.stem[:2]}"  # the notebook's page has the file's name
        contents[f"{name}.html"] = name.replace("_", " ").capitalize()
        shutil.copy(path, output / f"{name}.html")
    template = Path(__file__).parent / "templates" / "site.html.j2"
    frame = jinja2.Environment(autoescape=True).from_string(template.read_text(encoding="utf-8"))
    styles = {
        scheme: Markup(HtmlFormatter(style=style).get_style_defs(".highlight"))
        for scheme, style in {"light": "default", "dark": "github-dark"}.items()
    }
    for name, body in bodies.items():
        page = frame.render(name=name, body=Markup(body), contents=contents, code=styles)
        write_atomic(output / f"{name}.html", page)
    shutil.copy(output / f"{next(iter(bodies))}.html", output / "index.html")
    return [output / f"{name}.html" for name in bodies]


def _body(path: Path) -> str:
    """Render one notebook; links to other notebooks and to replays lead to the site's pages."""
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(path, as_version=4)
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise ValueError(f"{path.name} has no outputs: execute it (`grpo-kit notebooks`) first.")
    notebook.cells = [cell for cell in notebook.cells if cell.get("id") != "pip"]  # Colab's
    formulas: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _with_marks(cell.source, formulas)
    exporter = HTMLExporter(
        template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True
    )
    body, _ = exporter.from_notebook_node(notebook)
    body = re.sub(r"MATH(\d+)HTAM", lambda match: formulas[int(match[1])], body)
    body = re.sub(r'(href="\d\d_\w+)\.ipynb', r"\1.html", body)
    body = re.sub(r'href="\.\./data/replays/(\d\d)_\w+\.html"', r'href="replay_of_\1.html"', body)
    return re.sub(r'(?s)<a href="\.\./[^"]*">(.*?)</a>', r"\1 (in the repository)", body)


def _with_marks(source: str, formulas: list[str]) -> str:
    """Put a mark for each formula outside of code, as Markdown would break it; keep its MathML."""
    from latex2mathml.converter import convert

    def mark(match: re.Match) -> str:
        display = "block" if match["block"] else "inline"
        formulas.append(convert(match["block"] or match["inline"], display=display))
        return f"MATH{len(formulas) - 1}HTAM"

    parts = CODE.split(source)
    return "".join(part if i % 2 else MATH.sub(mark, part) for i, part in enumerate(parts))


def main(
    output: Annotated[Path, Argument(help="Folder for the site.")] = Path("runs/site"),
    notebooks: Annotated[Path, Argument(help="Folder of executed notebooks.")] = Path("notebooks"),
) -> None:
    """Build the site."""
    typer.echo(f"site: {build(notebooks, output)[0].with_name('index.html')}")


if __name__ == "__main__":
    typer.run(main)
