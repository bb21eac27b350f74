"""The notebook runner, on notebooks made here: what is reported, and what is left on disk."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from grpo_kit.course import runner as runner
from grpo_kit.course.runner import execute, find_notebooks, scrub
from grpo_kit.paths import write_atomic

PARAMETERS = 'PROFILE = "tiny"\nOUTPUT_DIR = "../runs/example"'


def make_notebook(folder: Path, name: str, *sources: str) -> Path:
    """A notebook with a title, the parameters cell and `sources`, in a folder that is a project."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "pyproject.toml").touch()
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        *[new_code_cell(source) for source in sources],
    ]
    path = folder / f"{name}.ipynb"
    path.write_text(nbformat.writes(new_notebook(cells=cells)), encoding="utf-8")
    return path


def printed(path: Path) -> str:
    """All text that the notebook's code cells wrote to their streams."""
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.slow
def test_a_failure_is_reported_and_the_next_notebook_still_runs(tmp_path, capsys):
    good = "print(PROFILE, OUTPUT_DIR)\nopen(OUTPUT_DIR + '/made', 'w').close()"
    folder = tmp_path / "notebooks"
    make_notebook(folder, "00_bad", "print('before')", "raise KeyError('no reward')", "print('x')")
    make_notebook(folder, "01_good", good)

    done = []
    results = execute(find_notebooks(folder), tmp_path / "runs", "smoke", on_done=done.append)

    assert [(r.notebook, r.status) for r in results] == [("00_bad", "failed"), ("01_good", "ok")]
    assert done == results and all(result.seconds > 0 for result in results)
    assert "KeyError" in results[0].error and "no reward" in results[0].error
    assert printed(tmp_path / "runs/00_bad.ipynb") == "before\n"  # as far as it got
    # The folder is injected relative to the notebook, and so holds nothing of this machine.
    assert printed(tmp_path / "runs/01_good.ipynb") == "smoke ../runs/01_good\n"
    assert (tmp_path / "runs/01_good/made").exists()

    report = json.loads((tmp_path / "runs/notebooks.json").read_text())
    assert report["profile"] == "smoke"
    assert [entry["status"] for entry in report["notebooks"]] == ["failed", "ok"]
    shown = capsys.readouterr().out
    assert "[1/2] 00_bad failed" in shown and "[2/2] 01_good ok" in shown
    assert not list((tmp_path / "runs").glob("*partial*")), "a temporary file was left behind"


def test_in_place_leaves_nothing_of_the_machine_and_does_not_change_when_repeated(tmp_path):
    folder = tmp_path / "notebooks"
    path = make_notebook(
        folder,
        "00_start",
        "import os, sys, tempfile\nprint(os.getcwd(), os.path.expanduser('~/x'), sys.prefix)",
        "object()",
        "import warnings; warnings.warn('mind the gap')",
        "from tqdm import tqdm\nfor _ in tqdm(range(3)): pass",
    )
    ids = [cell["id"] for cell in nbformat.read(path, as_version=4).cells]

    assert [r.status for r in execute([path], tmp_path / "runs", in_place=True)] == ["ok"]

    first = path.read_text(encoding="utf-8")
    for trace in (str(tmp_path), str(Path.home()), sys.prefix, tempfile.gettempdir(), "papermill"):
        assert trace not in first
    assert "injected-parameters" not in first
    assert "mind the gap" in first and "3/3" in first and "it/s" not in first
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell["id"] for cell in notebook.cells] == ids
    assert notebook.cells[1].metadata == {"tags": ["parameters"]}
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2, 3, 4, 5]

    execute([path], tmp_path / "runs", in_place=True)
    assert path.read_text(encoding="utf-8") == first


@pytest.mark.slow
def test_a_failed_run_in_place_leaves_the_notebook_untouched(tmp_path):
    path = make_notebook(tmp_path / "notebooks", "00_bad", "print(1)", "assert 1 > 2")
    before = path.read_bytes()

    (result,) = execute([path], tmp_path / "runs", in_place=True)

    assert result.status == "failed" and "AssertionError" in result.error
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["00_bad.ipynb"]


def scrubbed_outputs(outputs, checkout="/srv/kit"):
    """`outputs` of one cell after scrubbing."""
    executed = new_notebook(cells=[new_code_cell("1", outputs=outputs)])
    return scrub(executed, Path(checkout)).cells[0].outputs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("saved /srv/kit/runs/a.png", "saved runs/a.png"),
        ("in '/srv/kit'", "in '.'"),
        ("/srv/kitchen and /other/srv/kit", "/srv/kitchen and /other/srv/kit"),
        (f"{Path.home()}/.cache/hub", "~/.cache/hub"),
        ("/var/x/ipykernel_41/99.py:3: UserWarning", "{cell}:3: UserWarning"),
        ("<object at 0x7f00deadbeef>", "<object at 0x…>"),
        ("a mask of 0xff", "a mask of 0xff"),
        ("\r 0%| | 0/3 [00:00<?, ?it/s]\r100%|█| 3/3 [00:01<00:00,  2.9it/s]", "100%|█| 3/3"),
        ("\r100%|█| 3/3 [01:02:03<00:00, 2.1s/it, reward=0.5]", "100%|█| 3/3 [reward=0.5]"),
        ("7it [00:01, 6.2it/s]", "7it"),
        ("at [12:30] and [0, 1/2]", "at [12:30] and [0, 1/2]"),
        ("\x1b[31mred\x1b[0m\x1b[A", "\x1b[31mred\x1b[0m"),
    ],
)
def test_a_stream_keeps_what_is_said_and_loses_the_machine(text, expected):
    (output,) = scrubbed_outputs([new_output("stream", name="stdout", text=text)])
    assert output.text == expected


def test_how_a_stream_was_cut_into_messages_does_not_show():
    pieces = [new_output("stream", name="stdout", text=text) for text in ("a\nb", "c\n", "d")]
    (output,) = scrubbed_outputs(pieces)
    assert output.text == "a\nbc\nd"


def test_widget_views_go_and_figures_stay():
    figure = {"image/png": "aGk=", "text/plain": "<Figure at 0x7f00deadbeef>"}
    widget = {runner.WIDGET: {"model_id": "1"}, "text/plain": "  0%| | 0/3"}
    (output,) = scrubbed_outputs(
        [new_output("display_data", data=widget), new_output("display_data", data=figure)]
    )
    assert output.data == {"image/png": "aGk=", "text/plain": "<Figure at 0x…>"}


def test_a_path_that_is_told_from_its_end_is_made_relative_in_html_and_tracebacks():
    table = new_output("display_data", data={"text/html": "<td>/srv/kit/data/base</td>"})
    error = new_output("error", ename="E", evalue="/srv/kit/a", traceback=["/srv/kit/b.py"])
    shown, raised = scrubbed_outputs([table, error])
    assert shown.data["text/html"] == "<td>data/base</td>"
    assert (raised.evalue, raised.traceback) == ("a", ["b.py"])


def test_notebooks_are_found_in_order_by_name_and_by_number(tmp_path):
    for name in ("01_basic_grpo", "00_start_here"):
        make_notebook(tmp_path / "notebooks", name)

    def found(*names: str) -> list[str]:
        return [path.stem for path in find_notebooks(tmp_path / "notebooks", names)]

    assert found() == ["00_start_here", "01_basic_grpo"]
    assert found("01", "01_basic_grpo.ipynb") == ["01_basic_grpo"]
    with pytest.raises(ValueError, match="'02' names 0 notebooks.*: 00_start_here, 01_basic_grpo"):
        found("02")
    with pytest.raises(ValueError, match="no notebooks in .*top of a checkout"):
        find_notebooks(tmp_path)


def not_a_notebook(path):
    path.write_text("hello")


def without_parameters(path):
    nbformat.write(new_notebook(cells=[new_code_cell(PARAMETERS)]), path)


def already_injected(path):
    cell = new_code_cell("SEED = 1", metadata={"tags": ["injected-parameters"]})
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(cell)
    nbformat.write(notebook, path)


@pytest.mark.parametrize(
    ("prepare", "options", "match"),
    [
        (Path.touch, {"profile": "huge"}, "unknown profile 'huge': choose one of .*smoke.*tiny"),
        (Path.unlink, {}, "00_start.ipynb cannot be read as a notebook: FileNotFoundError"),
        (not_a_notebook, {}, "00_start.ipynb cannot be read as a notebook"),
        (without_parameters, {}, "00_start.ipynb needs one cell tagged `parameters`"),
        (already_injected, {"in_place": True}, "00_start.ipynb needs one cell .*injected"),
        (Path.touch, {"parameters": {"SEED": 1}, "in_place": True}, "SEED.*in_place: edit"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(prepare, options, match, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_run", lambda *_: pytest.fail("something was executed"))
    path = make_notebook(tmp_path / "notebooks", "00_start")
    prepare(path)
    with pytest.raises(ValueError, match=match):
        execute([path], tmp_path / "runs", **options)


def test_a_missing_papermill_or_an_unwritable_folder_is_told_before_anything_runs(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "_run", lambda *_: pytest.fail("something was executed"))
    path = make_notebook(tmp_path / "notebooks", "00_start")
    (tmp_path / "runs").write_text("a file, where a folder should go")
    with pytest.raises(RuntimeError, match="cannot write to the output folder .*runs.*choose"):
        execute([path], tmp_path / "runs")
    monkeypatch.setitem(sys.modules, "papermill", None)
    with pytest.raises(RuntimeError, match="papermill is not installed: pip install"):
        execute([path], tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_the_old_notebook_whole(kill, tmp_path):
    path = make_notebook(tmp_path / "notebooks", "00_long", "print('begun')", "input_never = 1",
                         f"open({str(tmp_path / 'sign')!r}, 'w').close()\n"
                         "import time; time.sleep(60)")  # fmt: skip
    before = path.read_bytes()
    code = "import sys; from grpo_kit.course.runner import execute; " \
           "execute(sys.argv[1:2], sys.argv[2], in_place=True)"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code, str(path), str(tmp_path / "runs")])
    deadline = time.monotonic() + 60
    while not (tmp_path / "sign").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(kill)
    assert process.wait(timeout=60) != 0
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["00_long.ipynb"]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "notebooks.md"
    path.write_text("old")

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_badges_and_install_cells_lead_to_the_repository_that_pyproject_names(tmp_path):
    checkout = Path(__file__).parents[2]
    repository = runner.repository_of(checkout)
    copies = []
    for path in sorted((checkout / "notebooks").glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        found = [match["repository"] for match in runner.ADDRESSES.finditer(text)]
        assert found == [repository] * 2, (path.name, found)
        copies.append(tmp_path / path.name)
        copies[-1].write_text(text, encoding="utf-8")
    changed = runner.set_repository(copies, "some-one/a.fork")
    assert changed == [path.stem for path in copies]
    text = copies[0].read_text(encoding="utf-8")
    assert f"github/some-one/a.fork/blob/main/notebooks/{copies[0].name}" in text
    assert "git+https://github.com/some-one/a.fork" in text and repository not in text
    nbformat.read(copies[0], as_version=4)
    runner.set_repository(copies, repository)
    assert copies[0].read_text() == (checkout / "notebooks" / copies[0].name).read_text()


def test_a_checkout_that_names_no_repository_is_told(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"names no repository: under \[project.urls\] write"):
        runner.repository_of(tmp_path)
