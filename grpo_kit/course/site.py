"""The executed notebooks, the report and the replays as one static site: `make site`.

nbconvert renders the notebooks, latex2mathml their formulas, so that a page needs no network. One
frame around all: contents, search, previous and next.
"""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
from typer import Argument

from grpo_kit.paths import data_dir, make_output_dir, write_atomic

MATH = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\\\w$])\$(?P<inline>[^\s$](?:[^$]*[^\s$])?)\$(?!\d)", re.S
)
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)
HEADING = re.compile(r'<h[1-4] id="([^"]*)">(.*?)</h[1-4]>', re.S)
STYLES = {"default": "light", "github-dark": "dark"}  # of pygments, by the reader's scheme


def build(notebooks: Path, output: Path, more: dict[str, Path] | None = None) -> list[Path]:
    """Write a page for each notebook of a folder, an index and what search needs; their paths.

    `more`: title -> an HTML file to be copied beside them and named in the contents. Raises
    ValueError for a folder without notebooks and for a notebook without outputs.
    """
    from pygments.formatters import HtmlFormatter

    from grpo_kit.course.runner import find_notebooks

    pages = [_page(path) for path in find_notebooks(notebooks)]
    make_output_dir(output)
    named = {}  # a replay has the name of its notebook, whose page this is to stand beside
    for title, path in (more or {}).items():
        if path.is_file():
            named[title] = f"{title.lower().replace(' ', '_')}.html"
            if path.resolve() != (output / named[title]).resolve():
                shutil.copy(path, output / named[title])
    template = Path(__file__).parent / "templates" / "site.html.j2"
    frame = jinja2.Environment(autoescape=True).from_string(template.read_text(encoding="utf-8"))
    code = {
        scheme: HtmlFormatter(style=name).get_style_defs(".highlight")
        for name, scheme in STYLES.items()
    }
    shared = {"pages": pages, "more": named, "code": code}
    for i, page in enumerate(pages):
        around = {"previous": pages[i - 1] if i else None, "next": (pages[i + 1 :] or [None])[0]}
        write_atomic(output / page["file"], frame.render(page=page, **around, **shared))
    write_atomic(output / "index.html", frame.render(page=None, **shared))
    found = [entry for page in pages for entry in page["sections"]]
    write_atomic(output / "search.js", f"const SECTIONS = {json.dumps(found)};\n")
    return [output / page["file"] for page in pages]


def _page(path: Path) -> dict[str, Any]:
    """File, title, first words, body and the sections that search finds, of one notebook."""
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
    body = re.sub(r'(?s)<a href="\.\./[^"]*">(.*?)</a>', r"\1 (in the repository)", body)
    file, sections = f"{path.stem}.html", []
    starts = [*HEADING.finditer(body)]
    title = _text(starts[0][2]) if starts else path.stem
    for start, end in zip(starts, [*(s.start() for s in starts[1:]), len(body)], strict=False):
        heading = f"{title} · {_text(start[2])}"
        sections.append([file, start[1], heading, _text(body[start.end() : end])])
    first = re.search(r"</h1>\s*<p>(.*?)</p>", body, re.S)
    idea = _text(first[1]) if first else ""
    return {"file": file, "title": title, "idea": idea, "body": body, "sections": sections}


def _with_marks(source: str, formulas: list[str]) -> str:
    """A mark for each formula outside of code, which Markdown would take apart; adds its MathML."""
    from latex2mathml.converter import convert

    def mark(match: re.Match) -> str:
        display = "block" if match["block"] else "inline"
        formulas.append(convert(match["block"] or match["inline"], display=display))
        return f"MATH{len(formulas) - 1}HTAM"

    parts = CODE.split(source)
    return "".join(part if i % 2 else MATH.sub(mark, part) for i, part in enumerate(parts))


def _text(fragment: str) -> str:
    """What a reader sees of HTML, on one line."""
    fragment = re.sub(
        r"(?s)<(style|script|svg|math)\b.*?</\1>|<a class=\"anchor-link\".*?</a>", " ", fragment
    )
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", fragment)).split())


def shipped_replays() -> dict[str, Path]:
    """Title -> page of each replay that the course ships."""
    paths = sorted((data_dir() / "replays").glob("*.html"))
    return {f"Replay of {path.stem[:2]}": path for path in paths}


def main(
    output: Annotated[Path, Argument(help="Folder for the site.")] = Path("runs/site"),
    notebooks: Annotated[Path, Argument(help="Folder of executed notebooks.")] = Path("notebooks"),
) -> None:
    """Build the site; a report that lies in its folder is part of it, and the shipped replays."""
    build(notebooks, output, {"Report": output / "report.html"} | shipped_replays())
    typer.echo(f"site: {output / 'index.html'}")


if __name__ == "__main__":
    typer.run(main)
