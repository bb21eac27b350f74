"""Tools: their schemas, how calls are read, and how they are run with limits.

A call is text that a model wrote: `lookup(lamp)`, or JSON. Whatever is wrong with it becomes a
short result, `error: …`, from which the planner can learn. A hanging call is abandoned in its
thread, which Python cannot stop: code that a model wrote needs its own process (`sandbox`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import get_type_hints

from anyio import CapacityLimiter, move_on_after, to_thread
from anyio.from_thread import start_blocking_portal
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from grpo_kit.config import reason

CONCURRENCY = 16  # calls of a batch at a time
MAX_CALL_CHARS = 200  # of a call as memory shows it
MAX_REASON_CHARS = 100  # of an error's reason

_PLAIN = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ToolResult:
    """A call on one line, and its outcome: text, or `error: …`."""

    call: str
    text: str
    error: bool


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, made by `Tool.of`; `arguments`: their JSON schemas."""

    name: str
    description: str
    arguments: dict[str, dict]
    required: list[str]
    function: Callable
    timeout: float
    columns: tuple[str, ...]
    _adapter: TypeAdapter = field(repr=False, compare=False)

    @classmethod
    def of(cls, function: Callable, *, timeout: float = 5.0, columns: Sequence[str] = ()) -> Tool:
        """Make a tool of a function or a callable object, by its type hints and docstring.

        timeout: seconds. columns: parameters that come from the dataset's row; no model sees them.
        """
        # transformers is slow to import, and reading calls does not need it
        from transformers.utils import get_json_schema

        name = getattr(function, "__name__", None) or repr(function)
        try:
            called = function if inspect.isroutine(function) else function.__call__
            schema = get_json_schema(called)["function"]
            hints = get_type_hints(called, include_extras=True)
            named = name.isidentifier() and schema["description"]
            if not named or inspect.iscoroutinefunction(called):
                raise TypeError("it has no name or description, or is a coroutine function")
        except Exception as error:  # AttributeError, NameError, and two of transformers' own
            wanted = "type hints and a Google-style docstring of each parameter, no async"
            raise ValueError(f"{name} is no tool yet ({error}): write {wanted}.") from error
        properties = schema["parameters"]["properties"]
        if unknown := sorted(set(columns) - set(properties)):
            raise ValueError(f"columns names {unknown}, which {name} does not take: drop them.")
        shown = {k: v for k, v in properties.items() if k not in columns}
        required = [k for k in schema["parameters"].get("required", []) if k in shown]
        description = " ".join(schema["description"].split())
        # a TypedDict, as a model class has names of its own ("copy", "json") that would collide
        types = {k: hints[k] if k in required else NotRequired[hints[k]] for k in shown}
        shape = TypedDict(name, types)
        shape.__pydantic_config__ = ConfigDict(extra="forbid")
        fixed, adapter = tuple(columns), TypeAdapter(shape)
        return cls(name, description, shown, required, function, timeout, fixed, adapter)

    @property
    def sole(self) -> str | None:
        """The argument that `name(text)` gives: the only required one, if a string."""
        types = [self.arguments[name].get("type") for name in self.required]
        return self.required[0] if types == ["string"] else None

    def validate(self, arguments: str | dict) -> dict:
        """The arguments converted to the hinted types; ValueError for a wrong one."""
        if isinstance(arguments, str):
            if not self.sole and (arguments.strip() or self.required):
                raise ValueError(f"call {self.name} with JSON")
            arguments = {self.sole: arguments} if self.sole else {}
        try:
            return self._adapter.validate_python(arguments)
        except ValidationError as error:
            raise ValueError(reason(error)) from None


def read_call(text: str) -> tuple[str, str | dict]:
    """A call's tool, and its arguments: a text in parentheses, or a dict; else ValueError."""
    text = text.strip()
    for opening, closing in (("<tool_call>", "</tool_call>"), ("```json", "```")):
        if text.startswith(opening) and text.endswith(closing):
            text = text.removeprefix(opening).removesuffix(closing).strip()
    if plain := _PLAIN.fullmatch(text):
        return plain[1], plain[2]
    try:
        match json.loads(text):
            case {"name": str(name), "arguments": dict(arguments)}:
                return name, arguments
    except (ValueError, RecursionError):
        pass
    raise ValueError("not a call")


class Toolkit:
    """The tools of an agent, functions or `Tool`s, which run here; longer results are cut."""

    def __init__(self, tools: Sequence[Tool | Callable], *, max_result_chars: int = 500):
        tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        self.tools = {tool.name: tool for tool in tools}
        self.names = list(self.tools)
        if not tools or len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            raise ValueError(f"the tools are {names}: give at least one, and each another name.")
        self.max_result_chars = max_result_chars

    def describe(self) -> str:
        """Name, arguments and purpose of every tool, two lines each, for a prompt."""
        lines = []
        for tool in self.tools.values():
            typed = ", ".join(
                f"{name}: {_type_text(schema)}{'' if name in tool.required else ' (optional)'}"
                for name, schema in tool.arguments.items()
            )
            meanings = (f"{name}: {s['description']}" for name, s in tool.arguments.items())
            lines.append(f"{tool.name}({typed}): {tool.description}")
            lines.append(f"  {'; '.join(meanings)}".rstrip())
        return "\n".join(filter(None, lines))

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raise ValueError where a tool takes a column that `where` lacks."""
        for tool in self.tools.values():
            if missing := set(tool.columns) - set(columns):
                needed = f"the tool {tool.name} takes the column {min(missing)!r}"
                raise ValueError(f"{needed}, which {where} lacks; it has {sorted(columns)}.")

    def run(self, calls: Sequence[tuple[str, Mapping]]) -> list[ToolResult]:
        """Run calls, each a (call text, dataset row), in parallel; results in their order.

        Raises ValueError where a row lacks a tool's column; nothing that a model wrote raises.
        """
        for _, row in calls:
            self.check_columns(row, "the row")

        async def results() -> list[ToolResult]:
            places = CapacityLimiter(CONCURRENCY)
            return await asyncio.gather(*(self._result(*call, places) for call in calls))

        with start_blocking_portal() as portal:  # a notebook has an event loop in this thread
            return portal.call(results)

    async def _result(self, text: str, row: Mapping, places: CapacityLimiter) -> ToolResult:
        shown = _cleaned(text, MAX_CALL_CHARS, one_line=True)
        try:
            name, arguments = read_call(text)
            tool = self.tools.get(name)
            given = arguments
            if isinstance(arguments, dict):
                given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            shown = _cleaned(f"{name}({given})", MAX_CALL_CHARS, one_line=True)
            if tool is None:
                raise ValueError(f'no tool "{name}"')
            arguments = tool.validate(arguments) | {c: row[c] for c in tool.columns}
        except (ValueError, RecursionError) as error:
            return ToolResult(shown, _error_text(error), True)
        async with places:
            with move_on_after(tool.timeout):
                # The thread is a daemon, as the portal's is: a hung call keeps no process alive.
                return await to_thread.run_sync(
                    self._called, shown, tool, arguments, abandon_on_cancel=True
                )
        return ToolResult(shown, f"error: timed out after {tool.timeout:g} s", True)

    def _called(self, shown: str, tool: Tool, arguments: dict) -> ToolResult:
        try:
            text = _cleaned(str(tool.function(**arguments)), self.max_result_chars)
            return ToolResult(shown, text, False)
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


def _type_text(schema: dict) -> str:
    if "enum" in schema:
        return "|".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    return "|".join(kind) if isinstance(kind, list) else kind
