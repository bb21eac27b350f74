"""Tools without a model: descriptions, calls, limits, and each tool's normal use."""

import os
import re
import signal
import sys
import threading
import time

import pytest

from grpo_kit.flow import tools
from grpo_kit.flow.sandbox import PythonTool
from grpo_kit.flow.toolbox import Lookup, calculator, make_catalogue
from grpo_kit.flow.tools import Tool, Toolkit, ToolResult

FACTS = [
    (1, "lamp", "lamp 14, shop Nord"), (1, "chair", "chair 7, shop Alba"),
    (1, "Nord", "Nord discount 3"), (2, "lamp", "lamp 21, shop Alba"),
    (2, "Alba", "Alba discount 2"),
]  # fmt: skip


def add(numbers: str, *, more: int = 0) -> str:
    """Add
    numbers.

    The second paragraph is for people.
    """
    return str(sum(map(int, numbers.split("+"))) + more)


def run(given, *calls, row=None, **limits) -> list[ToolResult]:
    return Toolkit(given, **limits).run([(call, row or {}) for call in calls])


@pytest.fixture(scope="module")
def echo(text_tool):
    return text_tool("echo", str)


@pytest.fixture
def catalogue(tmp_path):
    path = tmp_path / "facts.sqlite"
    make_catalogue(path, FACTS)
    return path


@pytest.fixture
def lookup(catalogue):
    """The tool over the catalogues of the row."""
    return Tool(Lookup(catalogue), columns=["catalogue"])


# --- descriptions and calls -----------------------------------------------------------------------


def test_a_description_names_the_argument_and_no_column(lookup):
    kit = Toolkit([Tool(add, columns=["more"]), lookup])
    assert kit.names == ["add", "lookup"]
    assert kit.describe().splitlines() == [
        "add(numbers): Add numbers.",
        "lookup(query): Find the fact whose name or text has the words of the query.",
    ]


def no_docstring(x): ...


async def later(x):
    """Take one."""


def two_texts(x, y):
    """Take two."""


def by_name(*, x):
    """Take one that has to be named."""


def number(x: int):
    """Take a number."""


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "it needs a name and a docstring"),
        (later, "no async"),
        (two_texts, "it cannot be called .missing a required argument: 'y'"),
        (by_name, "it cannot be called .*positional"),
        (number, "a model gives it a text, but x is hinted 'int': take a str and convert it"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function, problem):
    with pytest.raises(ValueError, match=f"^{function.__name__} is no tool: .*{problem}"):
        Tool(function)


def test_unknown_columns_no_tools_and_equal_names_are_refused(echo):
    with pytest.raises(ValueError, match=r"add .* the columns \['c'\] it cannot be called"):
        Tool(add, columns=["c"])
    for given in ([], [echo, echo]):
        with pytest.raises(ValueError, match="give at least one, and each another name"):
            Toolkit(given)


def test_a_call_is_a_name_and_the_text_in_its_parentheses(echo):
    texts = [" echo(a(b)c)\n", "echo()", "echo( two words )", "echo(1\n2)"]
    results = run([echo], *texts)
    assert [result.text for result in results] == ["a(b)c", "", " two words ", "1\n2"]
    assert [result.call for result in results] == [*map(str.strip, texts[:3]), "echo(1 2)"]
    assert run([echo], "echo(lamp) then")[0].text == "error: not a call"
    assert run([echo], "other(x)")[0] == ToolResult("other(x)", 'error: no tool "other"', True)
    (long,) = run([echo], f"echo({'y' * 500})")
    assert len(long.call) == 200 and long.call.endswith("…")


def test_columns_come_from_the_row_and_never_from_the_model(lookup):
    calls = [("lookup(lamp)", {"catalogue": 1 + i % 2}) for i in range(40)]
    texts = [result.text for result in Toolkit([lookup]).run(calls)]
    assert texts == ["lamp 14, shop Nord", "lamp 21, shop Alba"] * 20, "also from many threads"
    with pytest.raises(ValueError, match=r"column 'catalogue'.*\['answer'\]"):
        run([lookup], "lookup(lamp)", row={"answer": 3})  # the caller's mistake, not the model's


# --- running --------------------------------------------------------------------------------------


def test_results_keep_their_order_and_at_most_4_calls_are_under_way(text_tool, monkeypatch):
    monkeypatch.setattr(tools, "CONCURRENCY", 4)
    running, counts = set(), []

    def wait(text):
        running.add(threading.get_ident())
        counts.append(len(running))
        time.sleep(float(text))
        running.discard(threading.get_ident())
        return text

    waits = ["0.06", "0.0", "0.03", "0.01"] * 3
    results = run([text_tool("wait", wait)], *(f"wait({w})" for w in waits))
    assert [result.text for result in results] == waits and max(counts) == 4


def test_a_hung_call_times_out_and_reaches_no_later_run(text_tool, echo, monkeypatch):
    monkeypatch.setattr(tools, "CONCURRENCY", 2)
    release = threading.Event()
    hang = text_tool("hang", lambda text: release.wait())
    kit = Toolkit([Tool(hang, timeout=0.05), echo])
    *hung, done = kit.run([(call, {}) for call in [*["hang(x)"] * 5, "echo(done)"]])
    late = ("error: timed out after 0.05 s", True)
    assert [(result.text, result.error) for result in hung] == [late] * 5 and done.text == "done"
    release.set()
    assert [r.text for r in kit.run([("echo(1)", {}), ("echo(2)", {})])] == ["1", "2"]


@pytest.mark.slow
def test_a_hung_call_does_not_keep_the_process_alive(run_python):
    code = """
import threading
from grpo_kit.flow.tools import Tool, Toolkit

def hang(text: str) -> str:
    '''Never return.'''
    threading.Event().wait()

print(Toolkit([Tool(hang, timeout=0.05)]).run([("hang(x)", {})])[0].text)
"""
    assert run_python(code) == "error: timed out after 0.05 s\n"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad\nthing"), "error: bad thing"),
        (KeyError("x"), "error: KeyError: 'x'"),
        (SystemExit(3), "error: SystemExit: 3"),
        (KeyboardInterrupt(), "error: KeyboardInterrupt"),
        (Unprintable(), "error: test_tools.Unprintable: <exception str() failed>"),
        (ValueError("x" * 1000), "error: " + "x" * 99 + "…"),
    ],
)
def test_what_a_tool_raises_becomes_a_short_text(text_tool, error, text):
    def fail(_):
        raise error

    (result,) = run([text_tool("fail", fail)], "fail(x)")
    assert (result.text, result.error) == (text, True)


def test_an_interrupt_of_the_user_ends_the_run(text_tool):
    def interrupt(text):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run([text_tool("interrupt", interrupt)], "interrupt(x)")
    finally:
        signal.signal(signal.SIGINT, before)


def test_results_are_cut_and_lose_what_cannot_be_seen(text_tool):
    values = {"long": "ab" * 50, "odd": "a\x00b\x1b[1m\tc\r\nd\u202ee\ud800f", "number": 7}
    give = text_tool("give", values.get)
    long, odd, number = run([give], "give(long)", "give(odd)", "give(number)", max_result_chars=20)
    assert long.text == "ab" * 9 + "a…"
    assert odd.text == "ab[1m\tc\ndef"
    assert number.text == "7"


# --- calculator -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("14*3", "42"), ("6/2", "3"), ("7/2", "3.5"), ("1/3", "0.333333"), ("0.1+0.2", "0.3"),
        ("2/30000", "6.66667e-05"), ("-(2+3)*4", "-20"), ("2**10", "1024"), ("17 // 5", "3"),
        ("-7 % 3", "2"), ("1.5e3", "1500"), ("0*-1.0", "0"), ("9" * 15, "9" * 15),
    ],
)  # fmt: skip
def test_calculator_gives_the_expression_and_its_value(expression, value):
    assert calculator(f" {expression} ") == f"{expression} = {value}"


# --- lookup ---------------------------------------------------------------------------------------


def test_lookup_prefers_the_name_over_a_mention(catalogue):
    lookup = Lookup(catalogue)
    assert lookup("nord", catalogue=1) == "Nord discount 3"
    assert lookup("Alba", catalogue=1) == "chair 7, shop Alba"  # is mentioned only
    assert lookup("what is the lamp?", catalogue=2) == "lamp 21, shop Alba"
    assert lookup("lamp") == "lamp 14, shop Nord"  # the first of all catalogues
    for query, number in (("mirror", 1), ("lamp", 3), (" ?! ", 1)):
        assert lookup(query, catalogue=number) == "not found"


def test_a_catalogue_may_lie_under_any_name(tmp_path):
    folder = tmp_path / "a b?mode=rwc#c%20d"
    folder.mkdir()
    make_catalogue(folder / "ä?#%.sqlite", FACTS)
    assert Lookup(folder / "ä?#%.sqlite")("chair") == "chair 7, shop Alba"
    assert [path.name for path in folder.iterdir()] == ["ä?#%.sqlite"]
    make_catalogue(folder / "b", iter(FACTS))
    assert (folder / "b").read_bytes() == (folder / "ä?#%.sqlite").read_bytes()


@pytest.mark.parametrize("content", [None, b"", b"lamp 14\n" * 999])
def test_what_is_no_catalogue_is_refused_and_never_made(catalogue, content):
    catalogue.unlink()
    if content is not None:
        catalogue.write_bytes(content)
    before = list(catalogue.parent.iterdir())
    with pytest.raises(ValueError, match="facts.sqlite is no catalogue .*make_catalogue"):
        Lookup(catalogue)
    assert list(catalogue.parent.iterdir()) == before


# --- python ---------------------------------------------------------------------------------------

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")


@pytest.fixture(scope="module")
def python():
    return PythonTool(timeout=20)


@linux_only
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 2\nfor i in range(3):\n    print(x ** i)", "1\n2\n4"),
        ("import math, random\nprint(math.comb(5, 2), random.Random(0).randint(1, 1))", "10 1"),
        ("import datetime\nprint(datetime.date(2025, 3, 1) - datetime.timedelta(1))", "2025-02-28"),
        ("import time\ntime.sleep(0.01)\nprint('ä', end='')", "ä"),
        ("if __name__ == '__main__': print('said')\nraise SystemExit", "said"),
    ],
)
def test_python_returns_what_the_code_prints(python, code, text):
    assert python(code) == text


@linux_only
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print(1)\n1/0", "ZeroDivisionError: division by zero"),
        ("print(", "SyntaxError: '(' was never closed"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("raise ValueError('y' * 10**6)", "ValueError: " + "y" * 988),
        ("#" * 10_001, "code too long"),
    ],
)
def test_python_raises_the_last_line_of_the_traceback(python, code, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        python(code)


@linux_only
def test_python_cuts_long_output(python):
    assert python("print('0123456789' * 200)") == "0123456789" * 200
    for code in ("print('0123456789' * 200, 1)", "while True: print('0123456789' * 999)"):
        assert python(code) == "0123456789" * 199 + "012345678…"


@pytest.mark.slow
@linux_only
def test_python_does_not_outlive_the_process_that_asked(run_python):
    code = """
import threading, time, psutil
from grpo_kit.flow.sandbox import PythonTool

python = PythonTool(timeout=600)
threading.Thread(target=python, args=("import time; time.sleep(600)",), daemon=True).start()
time.sleep(0.5)
print(*(child.pid for child in psutil.Process().children()))
"""
    (pid,) = run_python(code).split()
    for _ in range(100):  # until init, or whoever stands for it, has taken note
        if not os.path.exists(f"/proc/{pid}") or "(zombie)" in open(f"/proc/{pid}/status").read():
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


@linux_only
def test_python_that_cannot_be_locked_is_refused_at_once(monkeypatch):
    # a lock that lets files be opened, as a container that ignores seccomp would
    monkeypatch.setattr("grpo_kit.flow.sandbox._PROBE", "print('open')")
    with pytest.raises(RuntimeError, match=r"cannot lock a process on linux \w+ \(open\)"):
        PythonTool()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(RuntimeError, match="linux riscv64 .*leave it out"):
        PythonTool()
