"""Calls as a planner should never write them: each ends in a text, and nothing gets out.

Each call runs in the one toolkit of the agent, beside a canary file, a catalogue with another
catalogue's facts in it, a server that counts who connects, and a secret in the environment.
"""

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from grpo_kit.flow.sandbox import PythonTool
from grpo_kit.flow.toolbox import Lookup, calculator, make_catalogue
from grpo_kit.flow.tools import Tool, Toolkit, ToolResult

SECRET = "tell-nobody-4711"
TIMEOUT = 1.0  # of the python tool
LONG = 100_000

# ------------------------------------------------------------- calculator: every one is an error

EXPRESSIONS = [
    "().__class__.__bases__[0].__subclasses__()", "1 .real", "''.join",
    "__import__('os').system('touch {canary}')", "open('{canary}', 'w')", "eval('1+1')", "rand()",
    "1/0", "two", "None", "...", "'a'*10**9", "b'a'*10**9", "[0]*10**9", "(0,)*10**9",
    "9**9**9**9", "99999**99999", "9.9**99", "2**101", "2**-1e400", "1e308*10",
    "1e400-1e400", "0*1e999", "1" * 99, "9" * LONG, "1<<10000000", "~1", "1==1", "1 if 1 else 2",
    "1 and 2", "(lambda f: f(f))(lambda f: f(f))", "(x:=5)", "x=5", "x",
    "[i for i in range(10**9)]", "{1: 2}", "[1][0]", "f'{1+1}'", "'{0.__class__}'.format(1)",
    "'%s' % 1", "1;2", "1\n2", "import os", "1 # comment", "1\\\n+1", "１+１", "²+1",
    "1\u200b+1", "1\x00+1", "1_000", "1j*1j", "(-1)**0.5", "0x10", "(" * 50,
    "(" * LONG + "1" + ")" * LONG, "-" * LONG + "1", "1+" * LONG + "1", "*args", "%d", "\ud800", "",
]  # fmt: skip

# --------------------------------- lookup: may find a fact of its own catalogue, and nothing else

QUERIES = [
    "'; DROP TABLE facts; --", "lamp'; DELETE FROM facts WHERE '1'='1", '" OR name:*',
    'lamp" OR "hidden', "lamp OR hidden", "* OR *", "lamp*", "hid*", "{name text}: hidden",
    "catalogue:2", "- name: lamp", "^hidden", "NEAR(lamp hidden, 5)", "NOT lamp", "AND OR NOT",
    '"', "'", "(((((", "x' UNION SELECT name FROM sqlite_master --",
    "'; ATTACH DATABASE '{canary}' AS x; CREATE TABLE x.y(z); --", "load_extension('libc.so.6')",
    "writefile('{canary}', 'x')", "PRAGMA query_only=OFF",
    "INSERT INTO facts(facts) VALUES('delete-all')", "lamp\x00hidden", "\ud800",
    "?1 :catalogue @x $y", "%s %d {0}", "_ _ _", "\u202eneddih", "hidden", "",
]  # fmt: skip

TOO_LONG_QUERIES = ["a" * LONG, '"' * LONG]

# ----------------------------------------------------- no calls, and calls that fit no tool: errors

NO_CALLS = [
    "", "\x00", "\ud800", "I would look it up.", "lookup", "lookup(lamp", "lookup lamp)", "(lamp)",
    "__import__('os').system('touch {canary}')", "eval(open('{canary}'))", "Toolkit(x)", "run(x)",
    "LOOKUP(lamp)", "lооkup(lamp)",  # with Cyrillic o
    "lookup(lamp); calculator(1+1)) and", '{"name":' * LONG, "[" * LONG + "]" * LONG,
    '{"name": "lookup", "arguments": {"query": "lamp"}}', "<tool_call>" * LONG, "a" * LONG + "(x)",
    "__init__(1)", "lookup\n\x1b[2J(x)", "lookup (lamp)", "lookup.path(lamp)", "lookup=lamp",
]  # fmt: skip

# -------------------------- python: what gets out prints "escaped"; most end in an error's text

LIBC = "import ctypes\nlibc = ctypes.CDLL(None)\n"
CODES = {
    "reads a file": "print('escaped', open('/etc/passwd').read())",
    "reads its environment": "import os; print(os.environ)\n"
    "print('escaped', open('/proc/self/environ').read())",
    "asks about a file": "import os; print('escaped', os.stat('{canary}'))",
    "overwrites a file": "open('{canary}', 'w').write('escaped')",
    "deletes a file": "import os; os.remove('{canary}'); print('escaped')",
    "runs a shell": "import os\n"
    "print('escaped' if os.system('touch {canary}2; echo escaped') == 0 else 'no')",
    "becomes a program": "import os; os.execv('/bin/echo', ['echo', 'escaped'])",
    "spawns": "import os; os.posix_spawn('/bin/echo', ['echo', 'escaped'], {})",
    "forks": "import os; os.fork(); print('escaped')",
    "fork bomb that insists": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "starts a thread": "import _thread\n_thread.start_new_thread(print, ('escaped',))\nprint('x')",
    "opens a connection below socket": LIBC
    + "print('escaped' if libc.socket(2, 1, 0) >= 0 else 'no')",
    "asks the web": "import urllib.request\n"
    "print('escaped', urllib.request.urlopen('http://127.0.0.1:{port}').read())",
    # 0 only asks: should the lock ever fail, nobody loses their session
    "may kill everything": "import os; os.kill(-1, 0); print('escaped')",
    "kills by number": "import os; os.kill({pid}, 9); print('escaped')",
    "leaves its session": "import os; os.setsid(); print('escaped')",
    "ignores signals": "import signal, time\n"
    "for n in (1, 2, 3, 13, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
    "while True: time.sleep(60)",
    "raises limits below resource": LIBC
    + "new = (ctypes.c_ulong * 2)(2**62, 2**62)\n"
    "print('escaped' if libc.setrlimit(9, new) == 0 else 'no')",
    "takes the filter off": LIBC
    + "print('escaped' if libc.prctl(22, 0, 0) == 0 or libc.prctl(38, 0, 0, 0, 0) == 0 else 'no')",
    "calls by number": LIBC
    + "fds = libc.syscall(2, b'/etc/passwd', 0), libc.syscall(257, -100, b'/etc/passwd', 0)\n"
    "print('escaped' if max(fds) >= 0 else 'no')",
    "calls by x32 numbers": LIBC
    + "print('escaped' if libc.syscall(0x40000002, b'/etc/passwd', 0) >= 0 else 'no')",
    "traces the parent": LIBC + "print('escaped' if libc.ptrace(16, {pid}, 0, 0) == 0 else 'no')",
    "writes to a null pointer": "import ctypes; ctypes.memset(0, 1, 1); print('escaped')",
    "loads a library": "import ctypes; ctypes.CDLL('libsqlite3.so.0'); print('escaped')",
    "keeps busy": "while True: pass", "sleeps": "import time; time.sleep(3600)",
    "keeps busy in one operation": "x = 10 ** 10 ** 9",
    "catches everything": "while True:\n  try:\n    while True: pass\n"
    "  except BaseException: pass",
    "prints for ever": "while True: print('y' * 1000)",
    "takes all memory": "x = []\nwhile True: x.append(bytearray(10 ** 7))",
    "recurses without limit": "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "recurses in C": "import sys; sys.setrecursionlimit(10 ** 9)\nx = []\n"
    "for _ in range(10 ** 6): x = [x]\nprint(len(repr(x)))",
    "nests deeply": "(" * 5000 + ")" * 5000,
    "raises an endless error": "raise ValueError('y' * 10_000_000)",
    "raises an error that raises": "class E(Exception):\n  def __str__(self): raise E\nraise E",
    "exits hard": "import os; os._exit(0)",
    "aborts": "import os; os.abort()",
    "closes its output": "import os; os.close(1); os.close(2); print('x' * 9999)",
    "finds all classes": "for c in object.__subclasses__():\n"
    "  if c.__name__ == 'Popen': c(['touch', '{canary}2'])",
    "looks into its frames": "import sys\nframe = sys._getframe()\n"
    "while frame: print(sorted(frame.f_globals)); frame = frame.f_back",
    "reads its caller's pipe": "import sys, os; print(os.read(0, 100), sys.argv)",
    "looks for descriptors": "import os\nfor fd in range(3, 99):\n"
    "  try: os.fstat(fd); print('escaped', fd)\n  except OSError: pass",
    "holds bytes that are no text": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "has a null byte": "print(1)\x00", "has a lone surrogate": "print('\ud800')",
}  # fmt: skip
# int 0x80 with number 20: getpid for 32 bits, but writev, which is allowed, for 64
CODES["runs machine code that calls as 32 bits"] = (
    LIBC + "libc.mmap.restype = ctypes.c_void_p\n"
    "page = libc.mmap(None, 4096, 7, 0x22, -1, 0)\n"
    "ctypes.memmove(page, bytes.fromhex('b814000000cd80c3'), 8)\n"
    "print('escaped', ctypes.CFUNCTYPE(ctypes.c_int)(page)())"
)


# ------------------------------------------------------------------------------------ the world


class World:
    """The toolkit, and what must be as it was after every call."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.canary = folder / "canary"
        self.canary.write_text("alive")
        catalogue = folder / "facts.sqlite"
        make_catalogue(catalogue, [(1, "lamp", "lamp 14"), (2, "hidden", "hidden lamp 99")])
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.connections, self.me = 0, psutil.Process()
        threading.Thread(target=self._count, daemon=True).start()
        lookup = Tool(Lookup(catalogue), columns=["catalogue"])
        tools = [calculator, lookup]
        if sys.platform == "linux":
            tools.append(Tool(PythonTool(timeout=TIMEOUT), timeout=2 * TIMEOUT))
        self.toolkit = Toolkit(tools)
        self.before = self.state()

    def _count(self):
        while True:
            connection, _ = self.server.accept()
            self.connections += 1
            connection.close()

    def state(self) -> dict:
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        return {"files": files, "connections": self.connections, "children": self.me.children()}

    def run(self, text: str) -> ToolResult:
        for name, value in (("canary", self.canary), ("port", self.port), ("pid", os.getpid())):
            text = text.replace(f"{{{name}}}", str(value))
        started = time.perf_counter()
        (result,) = self.toolkit.run([(text, {"catalogue": 1})])
        assert time.perf_counter() - started < 2 * TIMEOUT + 20  # on a busy machine, too

        assert isinstance(result, ToolResult)
        assert len(result.text) <= self.toolkit.max_result_chars and len(result.call) <= 200
        assert "\n" not in result.call
        (result.text + result.call).encode()  # a tokenizer can read them
        assert SECRET not in result.text
        assert self.state() == self.before
        return result


@pytest.fixture(scope="module")
def world():
    # pytest's own folders have long names, with which some of the calls would be refused for length
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("GRPO_KIT_TEST_SECRET", SECRET)
        world = World(Path(folder))
        yield world
        world.server.close()


def numbered(texts) -> list:
    return [pytest.param(text, id=f"{i} {text[:30]!a}") for i, text in enumerate(texts)]


@pytest.mark.parametrize("query", numbered(QUERIES + TOO_LONG_QUERIES))
def test_lookup_takes_any_query_for_words(world, query):
    replies = ["error: query too long"] if len(query) > 1000 else ["lamp 14", "not found"]
    assert world.run(f"lookup({query})").text in replies


@pytest.mark.parametrize("text", numbered([*map("calculator({})".format, EXPRESSIONS), *NO_CALLS]))
def test_what_is_no_small_sum_and_no_proper_call_is_refused(world, text):
    result = world.run(text)
    assert result.error and result.text.startswith("error: ")


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the python tool needs Linux")


@linux_only
@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in CODES.items()])
def test_python_computes_and_prints_and_does_no_more(world, code):
    result = world.run(f"python({code})")
    assert not result.text.startswith("escaped") and "\nescaped" not in result.text
    assert "root:" not in result.text


@linux_only
def test_many_hostile_calls_at_once_end_in_time(world):
    codes = ["while True: pass", "import time; time.sleep(60)", "while True: print(1)", "print(1)"]
    calls = [(f"python({code})", {"catalogue": 1}) for code in codes]
    results = world.toolkit.run(calls + [("lookup(lamp)", {"catalogue": 1})])
    assert [result.error for result in results[:2]] == [True, True]
    assert results[4].text == "lamp 14"
    assert world.state() == world.before
    assert world.run("calculator(14*3)").text == "14*3 = 42", "after all of it the toolkit works"
