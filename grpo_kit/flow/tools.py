"""Tools: functions of one text, and how the calls that a model wrote are read and run with limits.

A call is `lookup(lamp)`: a tool's name, and the text that it gets. Whatever is wrong with a call
becomes a short result, `error: …`, from which the planner can learn. A hanging call is abandoned in
its thread, which Python cannot stop: code that a model wrote needs its own process (`sandbox`).
"""

from __future__ import annotations

import asyncio
import inspect
import re
import traceback
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from anyio import CapacityLimiter, move_on_after, to_thread
from anyio.from_thread import start_blocking_portal

CONCURRENCY = 16  # calls of a batch at a time
MAX_CALL_CHARS = 200  # of a call as memory shows it
MAX_REASON_CHARS = 100  # of an error's reason

_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ToolResult:
    """A call on one line, and its outcome: text, or `error: …`."""

    call: str
    text: str
    error: bool


class Tool:
    """A function, or callable object, of one text that a model may call.

    The first paragraph of its docstring describes it to the model. timeout: seconds. columns: other
    parameters, which come from the dataset's row; no model sees or sets them. Raises ValueError
    where the function cannot be a tool.
    """

    def __init__(self, function: Callable, *, timeout: float = 5.0, columns: Sequence[str] = ()):
        self.name = getattr(function, "__name__", None) or repr(function)
        self.function, self.timeout, self.columns = function, timeout, tuple(columns)
        called = function if inspect.isroutine(function) else function.__call__
        self.description = " ".join((inspect.getdoc(called) or "").partition("\n\n")[0].split())
        named = self.name.isidentifier() and self.description
        if not named or inspect.iscoroutinefunction(called):
            raise ValueError(f"{self.name} is no tool: it needs a name and a docstring, no async.")
        signature = inspect.signature(called)
        try:
            signature.bind("text", **dict.fromkeys(self.columns))
        except TypeError as error:
            problem = f"{self.name} is no tool: with one text and the columns {[*self.columns]}"
            raise ValueError(f"{problem} it cannot be called ({error}).") from None
        argument = next(iter(signature.parameters.values()))
        if argument.annotation not in (argument.empty, str, "str"):
            hint = inspect.formatannotation(argument.annotation)
            problem = f"{self.name} is no tool: a model gives it a text, but {argument.name} is"
            raise ValueError(f"{problem} hinted {hint!r}: take a str and convert it.")
        self.argument = argument.name


class Toolkit:
    """The tools of an agent, functions or `Tool`s, which run here; longer results are cut."""

    def __init__(self, tools: Sequence[Tool | Callable], *, max_result_chars: int = 500):
        tools = [tool if isinstance(tool, Tool) else Tool(tool) for tool in tools]
        self.tools = {tool.name: tool for tool in tools}
        self.names = list(self.tools)
        if not tools or len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            raise ValueError(f"the tools are {names}: give at least one, and each another name.")
        self.max_result_chars = max_result_chars

    def describe(self) -> str:
        """Name, argument and purpose of every tool, one a line, for a prompt."""
        tools = self.tools.values()
        return "\n".join(f"{tool.name}({tool.argument}): {tool.description}" for tool in tools)

    def run(self, calls: Sequence[tuple[str, Mapping]]) -> list[ToolResult]:
        """Run calls, each a (call text, dataset row), in parallel; results in their order.

        Raises ValueError where a row lacks a tool's column; nothing that a model wrote raises.
        """
        for tool, (_, row) in product(self.tools.values(), calls):
            if missing := sorted(set(tool.columns) - set(row)):
                needed = f"the tool {tool.name} takes the column {missing[0]!r}"
                raise ValueError(f"{needed}, which the row lacks; it has {sorted(row)}.")

        async def results() -> list[ToolResult]:
            places = CapacityLimiter(CONCURRENCY)
            return await asyncio.gather(*(self._result(*call, places) for call in calls))

        with start_blocking_portal() as portal:  # a notebook has an event loop in this thread
            return portal.call(results)

    async def _result(self, text: str, row: Mapping, places: CapacityLimiter) -> ToolResult:
        shown = _cleaned(text.strip(), MAX_CALL_CHARS, one_line=True)
        call = _CALL.fullmatch(text.strip())
        if not call or call[1] not in self.tools:
            problem = f'no tool "{call[1]}"' if call else "not a call"
            return ToolResult(shown, _error_text(ValueError(problem)), True)
        tool = self.tools[call[1]]
        columns = {column: row[column] for column in tool.columns}
        async with places:
            with move_on_after(tool.timeout):
                # The thread is a daemon, as the portal's is: a hung call keeps no process alive.
                return await to_thread.run_sync(
                    self._called, shown, tool.function, call[2], columns, abandon_on_cancel=True
                )
        return ToolResult(shown, f"error: timed out after {tool.timeout:g} s", True)

    def _called(self, shown: str, function: Callable, text: str, columns: dict) -> ToolResult:
        try:
            result = _cleaned(str(function(text, **columns)), self.max_result_chars)
            return ToolResult(shown, result, False)
        except BaseException as error:  # also SystemExit: a tool ends no process
            return ToolResult(shown, _error_text(error), True)


def _error_text(error: BaseException) -> str:
    # a ValueError is meant for the reader; others are surprises and say what they are
    said = traceback.format_exception_only(error)[-1].removeprefix("ValueError: ")
    return f"error: {_cleaned(said, MAX_REASON_CHARS, one_line=True)}"


def _cleaned(text: str, limit: int, *, one_line: bool = False) -> str:
    """At most `limit` characters, without control, format, surrogate and unassigned ones."""
    kept = (c for c in text if c in "\n\t" or unicodedata.category(c)[0] != "C")
    text = "".join(islice(kept, limit + 1))
    if one_line:
        text = " ".join(text.splitlines())
    return text if len(text) <= limit else text[: limit - 1] + "…"
