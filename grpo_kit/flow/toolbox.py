"""Tools of the kit: `calculator`, and `Lookup` in a shipped catalogue.

They read what a model wrote, so each refuses what it does not take, in few words (ValueError).
"""

import ast
import re
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from simpleeval import DEFAULT_OPERATORS, InvalidExpression, SimpleEval

from grpo_kit.paths import write_atomic

NOT_FOUND = "not found"  # the result of a search that finds nothing
MAX_EXPRESSION_CHARS = 100
MAX_NUMBER = 1e15  # below, every whole float is exact
MAX_EXPONENT = 100
MAX_QUERY_CHARS = 100

_ARITHMETIC = re.compile(r"[0-9eE.+\-*/%() ]+")


def _power(base: int | float, exponent: int | float) -> int | float:
    if abs(base) >= MAX_NUMBER or abs(exponent) > MAX_EXPONENT:
        raise ValueError("number too large")
    return base**exponent


# Made once: making one changes the filters of `warnings`, which no thread may do beside others.
_EVALUATOR = SimpleEval(DEFAULT_OPERATORS | {ast.Pow: _power}, {}, {})
# simpleeval also knows names, calls, attributes, strings, ...
_ARITHMETIC_NODES = (ast.BinOp, ast.UnaryOp, ast.Constant)
_EVALUATOR.nodes = {kind: _EVALUATOR.nodes[kind] for kind in _ARITHMETIC_NODES}


def calculator(expression: str) -> str:
    """Calculate with numbers, + - * / // % ** and parentheses, such as (20-5)/2."""
    expression = expression.strip()
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError("expression too long")
    if not _ARITHMETIC.fullmatch(expression):
        raise ValueError("bad expression")
    try:
        tree = ast.parse(expression, mode="eval")
        value = _EVALUATOR.eval(expression, previously_parsed=tree.body)
        if not -MAX_NUMBER < value < MAX_NUMBER:  # TypeError for a complex root
            raise OverflowError
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("number too large") from None
    except (SyntaxError, TypeError, MemoryError, RecursionError, InvalidExpression):
        raise ValueError("bad expression") from None
    if value == int(value):
        return f"{expression} = {int(value)}"
    shown = f"{value:.6g}" if abs(value) < 1e-3 else f"{value:.6f}".rstrip("0").rstrip(".")
    return f"{expression} = {shown}"


_SEARCH = """
SELECT text FROM facts WHERE facts MATCH :words AND (:catalogue IS NULL OR catalogue = :catalogue)
ORDER BY bm25(facts, 100.0, 1.0), rowid LIMIT 1
"""


def make_catalogue(path: str | Path, facts: Iterable[tuple[int, str, str]]) -> None:
    """Write the file that `Lookup` reads, whole or not at all, from (catalogue, name, text).

    The same facts in the same order give the same bytes with the same version of SQLite.
    """
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "new.sqlite")
        with closing(sqlite3.connect(new)) as connection:
            columns = "name, text, catalogue UNINDEXED"
            connection.execute(f"CREATE VIRTUAL TABLE facts USING fts5({columns})")
            insert = "INSERT INTO facts (catalogue, name, text) VALUES (?, ?, ?)"
            connection.executemany(insert, facts)
            connection.execute("INSERT INTO facts (facts) VALUES ('optimize')")
            connection.commit()
            connection.execute("VACUUM")
        write_atomic(path, new.read_bytes())


class Lookup:
    """Full-text search in a catalogue file (SQLite FTS5), only read; ValueError if it is none."""

    __name__ = "lookup"

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        try:
            self("a")
        except sqlite3.Error as error:
            message = f"{self.path} is no catalogue ({error}): write one with make_catalogue."
            raise ValueError(message) from error

    def __call__(self, query: str, *, catalogue: int | None = None) -> str:
        """Find the fact whose name or text has the words of the query.

        Only facts of `catalogue` count, if it is not None.
        """
        if len(query) > MAX_QUERY_CHARS:
            raise ValueError("query too long")
        # Each word as an FTS5 string: AND, NEAR, *, name: and quotes have no meaning then.
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        if not words:
            return NOT_FOUND
        # a connection of its own, as it belongs to one thread
        with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as connection:
            values = {"words": words, "catalogue": catalogue}
            fact = connection.execute(_SEARCH, values).fetchone()
        return fact[0] if fact else NOT_FOUND
