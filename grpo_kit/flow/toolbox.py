"""Tools of the kit: `calculator`, `Lookup` in a shipped catalogue, `WikipediaSearch`.

They read what a model wrote, so each refuses what it does not take, in few words (ValueError).
"""

from __future__ import annotations

import ast
import html
import json
import math
import operator
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from pydantic import HttpUrl, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from simpleeval import InvalidExpression, SimpleEval

from grpo_kit.paths import write_atomic

NOT_FOUND = "not found"  # the result of a search that finds nothing
MAX_EXPRESSION_CHARS = 100
MAX_NUMBER = 1e15  # below, every whole float is exact
MAX_EXPONENT = 100

_ARITHMETIC = re.compile(r"[0-9eE.+\-*/%() ]+")


def _number(value: object) -> int | float:
    if type(value) not in (int, float) or math.isnan(value):
        raise ValueError("bad expression")  # a complex root, True, a string
    if abs(value) >= MAX_NUMBER:
        raise ValueError("number too large")
    return value


def _power(base: int | float, exponent: int | float) -> int | float:
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError("number too large")
    return base**exponent


def _limited(function: Callable) -> Callable:
    return lambda *numbers: _number(function(*numbers))


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
# Made once: making one changes the filters of `warnings`, which no thread may do beside others.
_EVALUATOR = SimpleEval({kind: _limited(f) for kind, f in _OPERATORS.items()}, {}, {})
# simpleeval also knows names, calls, attributes, strings, ...
_EVALUATOR.nodes = {kind: _EVALUATOR.nodes[kind] for kind in (ast.BinOp, ast.UnaryOp)} | {
    ast.Constant: lambda node: _number(node.value)
}


def calculator(expression: str) -> str:
    """Calculate with numbers, + - * / // % ** and parentheses.

    Args:
        expression: such as 14*3 or (20-5)/2

    Returns:
        the expression and its value, such as 14*3 = 42
    """
    expression = expression.strip()
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError("expression too long")
    if not _ARITHMETIC.fullmatch(expression):
        raise ValueError("bad expression")
    try:
        tree = ast.parse(expression, mode="eval")
        value = _number(_EVALUATOR.eval(expression, previously_parsed=tree.body))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("number too large") from None
    except (SyntaxError, MemoryError, RecursionError, InvalidExpression):
        raise ValueError("bad expression") from None
    if value == int(value):
        return f"{expression} = {int(value)}"
    shown = f"{value:.6g}" if abs(value) < 1e-3 else f"{value:.6f}".rstrip("0").rstrip(".")
    return f"{expression} = {shown}"


MAX_QUERY_CHARS = 100
_QUERY_SECONDS = 1.0

_SEARCH = """
SELECT text FROM facts WHERE facts MATCH :words AND rowid BETWEEN :first AND :last
AND (:catalogue IS NULL OR catalogue = :catalogue)
ORDER BY bm25(facts, 100.0, 1.0), rowid LIMIT :limit
"""
_RANGES = "SELECT catalogue, min(rowid), max(rowid) FROM facts GROUP BY catalogue"


def make_catalogue(path: str | Path, facts: Iterable[tuple[int, str, str]]) -> None:
    """Write the file that `Lookup` reads, whole or not at all, from (catalogue, name, text).

    The same facts in the same order give the same bytes with the same version of SQLite.
    """
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "new.sqlite")
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            columns = "name, text, catalogue UNINDEXED"
            connection.execute(f"CREATE VIRTUAL TABLE facts USING fts5({columns})")
            insert = "INSERT INTO facts (catalogue, name, text) VALUES (?, ?, ?)"
            connection.executemany(insert, facts)
            for statement in ("INSERT INTO facts (facts) VALUES ('optimize')", "COMMIT", "VACUUM"):
                connection.execute(statement)
        write_atomic(path, new.read_bytes())


class Lookup:
    """Full-text search in a catalogue file (SQLite FTS5), which is only ever read.

    limit: most facts of a result. Raises ValueError where `path` is no catalogue.
    """

    __name__ = "lookup"

    def __init__(self, path: str | Path, limit: int = 1):
        self.path, self.limit = Path(path).resolve(), limit
        try:
            with closing(self._connect()) as connection:
                # the whole file once, as a damaged page may lie anywhere
                check = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if check != "ok":
                    raise sqlite3.DatabaseError(check)
                # FTS5 cannot index the catalogue, but it skips to rows: ten times as fast
                self._rows = {of: rows for of, *rows in connection.execute(_RANGES)}
                self._search(connection, "a", None)
        except sqlite3.Error as error:
            reason = " ".join(str(error).split())
            message = f"{self.path} is no catalogue ({reason}): write one with make_catalogue."
            raise ValueError(message) from error

    def __call__(self, query: str, *, catalogue: int | None = None) -> str:
        """Find the fact whose name or text has the words of the query.

        Args:
            query: the name of what is to be found
            catalogue: only facts of this one

        Returns:
            the fact's text, or not found
        """
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError("query too long")
        try:  # one connection a call, since a connection belongs to one thread
            with closing(self._connect()) as connection:
                texts = self._search(connection, query, catalogue)
        except sqlite3.Error as error:
            raise ValueError(f"catalogue unreadable, {error}") from error
        return "\n".join(texts) or NOT_FOUND

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)
        connection.execute("PRAGMA query_only=ON")
        end = time.monotonic() + _QUERY_SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        return connection

    def _search(self, connection, query: str, catalogue: int | None) -> list[str]:
        # Each word as an FTS5 string: AND, NEAR, *, name: and quotes have no meaning then.
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        every = (-(2**63), 2**63 - 1)
        first, last = every if catalogue is None else self._rows.get(catalogue, (1, 0))
        if not words:
            return []
        values = {"words": words, "catalogue": catalogue, "first": first, "last": last}
        rows = connection.execute(_SEARCH, values | {"limit": self.limit})
        return [text for (text,) in rows]


MAX_ANSWER_BYTES = 1_000_000


@dataclass
class WikipediaSearch:
    """Search of a MediaWiki, by its API; needs a network, and `pip install 'grpo-kit[tools]'`.

    base_url: of the wiki's `api.php`. timeout: seconds, for the whole answer. limit: most pages.
    """

    base_url: HttpUrl = HttpUrl("https://en.wikipedia.org/w/api.php")
    timeout: PositiveFloat = 10.0
    limit: PositiveInt = 3

    @property
    def __name__(self) -> str:
        return "wikipedia_search"

    def __call__(self, query: str) -> str:
        """Search Wikipedia for pages, and show where they mention the words of the query.

        Args:
            query: a few words

        Returns:
            title and excerpt of the best pages, one a line, or not found
        """
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError("query too long")
        answer = self._get(query)
        try:
            pages = json.loads(answer)["query"]["search"][: self.limit]
            lines = [f"{page['title']}: {_plain(page['snippet'])}" for page in pages]
        except (ValueError, KeyError, TypeError, RecursionError):  # ValueError: not JSON
            raise ValueError("the answer is no search result") from None
        return "\n".join(lines) or NOT_FOUND

    def _get(self, query: str) -> bytes:
        import httpx

        parameters = {"action": "query", "list": "search", "format": "json", "utf8": 1}
        parameters |= {"srsearch": query, "srlimit": self.limit}
        agent = f"grpo-kit (a course on GRPO) python-httpx/{httpx.__version__}"
        # a small compressed answer could be a large one, and httpx unpacks before we count
        headers = {"User-Agent": agent, "Accept-Encoding": "identity"}
        answer, end = b"", time.monotonic() + self.timeout
        options = {"params": parameters, "headers": headers, "timeout": self.timeout}
        try:
            with httpx.stream("GET", str(self.base_url), **options) as response:
                if response.status_code != 200:
                    raise ValueError(f"HTTP {response.status_code}")
                for part in response.iter_raw():
                    answer += part
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise ValueError("the answer is too large")
                    if time.monotonic() > end:  # httpx's timeout is that of a silence
                        raise ValueError("timed out")
        except httpx.TimeoutException:
            raise ValueError("timed out") from None
        except httpx.HTTPError:
            raise ValueError("not reachable") from None
        return answer


def _plain(snippet: str) -> str:
    """The text of a snippet of HTML, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", snippet)).split())
