"""The notebook runner, on notebooks made here: what is reported, and what is left on disk."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from grpo_kit.course import runner
from grpo_kit.course.runner import execute, find_notebooks, scrub
from grpo_kit.paths import write_atomic

PARAMETERS = 'PROFILE = "tiny"\nOUTPUT_DIR = "../runs/example"'


def make_notebook(folder: Path, name: str, *sources: str) -> Path:
    """A notebook with a title, the parameters cell and `sources`."""
    folder.mkdir(parents=True, exist_ok=True)
    title, tagged = new_markdown_cell("# Title"), {"tags": ["parameters"]}
    cells = [title, new_code_cell(PARAMETERS, metadata=tagged), *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def printed(path: Path) -> str:
    """All text that the notebook's code cells wrote to their streams."""
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_in_place_leaves_nothing_of_the_machine_and_does_not_change_when_repeated(tmp_path):
    cells = (
        "import os, sys, tempfile\nprint(os.getcwd(), os.path.expanduser('~/x'), sys.prefix)",
        "object()",
        "import warnings; warnings.warn('mind the gap')",
        "from tqdm import tqdm\nfor _ in tqdm(range(3)): pass",
    )
    path = make_notebook(tmp_path / "notebooks", "00_start", *cells)
    ids = [cell["id"] for cell in nbformat.read(path, as_version=4).cells]
    assert [r.error for r in execute([path], tmp_path / "runs", in_place=True)] == [""]
    first = path.read_text(encoding="utf-8")
    for trace in (str(tmp_path), str(Path.home()), sys.prefix, tempfile.gettempdir(), "papermill"):
        assert trace not in first
    assert "mind the gap" in first and "3/3" in first and "it/s" not in first
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell["id"] for cell in notebook.cells] == ids
    assert notebook.cells[1].metadata == {"tags": ["parameters"]}
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2, 3, 4, 5]
    execute([path], tmp_path / "runs", in_place=True)
    assert path.read_text(encoding="utf-8") == first


def test_a_failed_run_in_place_leaves_the_notebook_untouched(tmp_path):
    path = make_notebook(tmp_path / "notebooks", "00_bad", "print(1)", "assert 1 > 2")
    before = path.read_bytes()
    (result,) = execute([path], tmp_path / "runs", in_place=True)
    assert "AssertionError" in result.error
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


MEET = """
import time
from contextlib import suppress
from pathlib import Path
Path({own!r}).touch()
while not Path({other!r}).exists(): time.sleep(0.1)
"""


def test_two_notebooks_run_at_a_time_and_a_failure_stops_no_other(tmp_path, capsys):
    folder, (one, two) = tmp_path / "notebooks", (str(tmp_path / name) for name in ("a", "b"))
    make_notebook(folder, "00_one", MEET.format(own=one, other=two), "print(PROFILE, OUTPUT_DIR)")
    broken = ("print('before')", "raise KeyError('no reward')", "print('after')")
    make_notebook(folder, "01_two", MEET.format(own=two, other=one), *broken)
    own = "import os; print(os.environ['OMP_NUM_THREADS']); open(OUTPUT_DIR + '/made', 'w')"
    make_notebook(folder, "02_three", own)
    where, environment = Path.cwd(), dict(os.environ)
    one, two, three = execute(find_notebooks(folder), tmp_path / "runs", "smoke", jobs=2)
    assert two.error.startswith("cell [") and one.error == three.error == "" and one.seconds > 0
    lines = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert set(lines[:2]) == {"[1/3] 00_one ...", "[2/3] 01_two ..."}
    assert {"[1/3] 00_one ok", "[2/3] 01_two failed", "[3/3] 02_three ok"} < {*lines}
    assert len(lines) == 6
    # The folder is injected relative to the notebook, and so holds nothing of this machine.
    assert printed(tmp_path / "runs/00_one.ipynb") == "smoke ../runs/00_one\n"
    assert printed(tmp_path / "runs/01_two.ipynb") == "before\n"  # as far as it got
    assert printed(tmp_path / "runs/02_three.ipynb") == "1\n"
    assert (tmp_path / "runs/02_three/made").exists()
    assert not list((tmp_path / "runs").glob("*partial*")), "a temporary file was left behind"
    assert (Path.cwd(), dict(os.environ)) == (where, environment)


def alive(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    return False


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_old_notebooks_whole_and_no_kernel(ending, tmp_path):
    begun = [tmp_path / "begun 0", tmp_path / "begun 1"]
    paths = [
        make_notebook(
            tmp_path / "notebooks", f"0{i}_long", "import os, time; print(1)",
            f"open({str(file)!r}, 'w').write(str(os.getpid()))", "time.sleep(600)",
        )
        for i, file in enumerate(begun)
    ]  # fmt: skip
    before = [path.read_bytes() for path in paths]
    given = f"{[*map(str, paths)]}, 'runs', in_place=True, jobs=2"
    code = (  # a shell's background ignores SIGINT, and its children inherit that
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"from {runner.__name__} import execute; execute({given})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    while not all(file.exists() and file.read_text() for file in begun):
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.1)
    process.send_signal(ending)
    assert process.wait(timeout=60) != 0
    assert [path.read_bytes() for path in paths] == before
    assert sorted(paths[0].parent.iterdir()) == paths
    # after SIGKILL they notice by themselves that nobody is left
    kernels = [int(file.read_text()) for file in begun]
    end = time.monotonic() + (0 if ending == signal.SIGINT else 30)
    while any(map(alive, kernels)) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(map(alive, kernels))


def scrubbed_outputs(outputs, checkout="/srv/kit"):
    """`outputs` of one cell after scrubbing."""
    executed = new_notebook(cells=[new_code_cell("1", outputs=outputs)])
    return scrub(executed, Path(checkout)).cells[0].outputs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("saved /srv/kit/runs/a.png", "saved ./runs/a.png"),
        ("/srv/kitchen and /other/srv/kit", "/srv/kitchen and /other/srv/kit"),
        (f"{Path.home()}/.cache/hub", "~/.cache/hub"),
        ("/var/x/ipykernel_41/99.py:3: UserWarning", "{cell}:3: UserWarning"),
        ("<object at 0x7f00deadbeef>", "<object at 0x…>"),
        ("a mask of 0xff", "a mask of 0xff"),
        ("[2/6] plain, seed 0: 0.8, 27 s", "[2/6] plain, seed 0: 0.8"),
        ("\r 0%| | 0/3 [00:00<?, ?it/s]\r100%|█| 3/3 [00:01<00:00,  2.9it/s]", "100%|█| 3/3"),
        ("\r100%|█| 3/3 [01:02:03<00:00, 2.1s/it, reward=0.5]", "100%|█| 3/3 [reward=0.5]"),
        ("at [12:30] and [0, 1/2]", "at [12:30] and [0, 1/2]"),
        ("\x1b[31mred\x1b[0m\x1b[A", "\x1b[31mred\x1b[0m"),
    ],
)
def test_a_stream_keeps_what_is_said_and_loses_the_machine(text, expected):
    (output,) = scrubbed_outputs([new_output("stream", name="stdout", text=text)])
    assert output.text == expected


def test_streams_are_joined_widgets_go_and_figures_and_tables_lose_the_machine():
    figure = {"image/png": "aGk=", "text/plain": "<Figure at 0x7f00deadbeef>"}
    widget = {runner.WIDGET: {"model_id": "1"}, "text/plain": "  0%| | 0/3"}
    table = {"text/html": "<td>/srv/kit/data/base</td>"}
    streams = [new_output("stream", name="stdout", text=text) for text in ("a\nb", "c\n", "d")]
    shown = [new_output("display_data", data=data) for data in (widget, figure, table)]
    stream, *data = scrubbed_outputs([*streams, *shown])
    assert stream.text == "a\nbc\nd"
    assert [output.data for output in data] == [
        {"image/png": "aGk=", "text/plain": "<Figure at 0x…>"},
        {"text/html": "<td>./data/base</td>"},
    ]


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("no notebook", {}, "00_start.ipynb cannot be read as a notebook"),
        ("nbval-skip", {}, "00_start.ipynb needs one cell tagged `parameters`"),
        ("injected-parameters", {"in_place": True}, "00_start.ipynb needs one cell .*injected"),
        ("", {"output_dir": __file__}, "cannot write to the output folder .*choose"),
        ("papermill", {}, "papermill is not installed: pip install"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(kind, options, match, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_run", lambda *_: pytest.fail("something was executed"))
    path = make_notebook(tmp_path / "notebooks", "00_start")
    if kind == "papermill":
        monkeypatch.setitem(sys.modules, "papermill", None)
    elif kind == "no notebook":
        path.write_text("hello")
    elif kind:  # another tag instead of `parameters`
        path.write_text(path.read_text().replace('"parameters"', f'"{kind}"'))
    with pytest.raises((ValueError, RuntimeError), match=match):
        execute([path], **{"output_dir": tmp_path / "runs", **options})


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "00_start.ipynb"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_no_notebook_installs_from_a_place_that_anybody_could_take():
    """A name that nobody owns would run the code of whoever registers it."""
    for path in find_notebooks(Path(__file__).parents[2] / "notebooks"):
        text = path.read_text(encoding="utf-8")
        assert "colab.research" not in text and "git+https" not in text and "Upload a wheel" in text
