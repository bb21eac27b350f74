"""Tools: their schemas, how calls are read, and how they are run with limits.

A tool is a function with type hints and a Google-style docstring, which make its schema. A call is
text that a model wrote: `lookup(lamp)`, as a small one can, or JSON, as larger ones are trained to.
Whatever is wrong with a call becomes a short result, `error: …`, from which the planner can learn;
an exception would end the run.

Time limits protect a run, not a machine: a hanging call is abandoned in its thread, which Python
cannot stop. Code that a model wrote belongs into a process of its own (`sandbox.PythonTool`).
"""

from __future__ import annotations

import inspect
import json
import re
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

MAX_CALL_CHARS = 200  # of a call as memory shows it
MAX_REASON_CHARS = 100  # of an error's reason

_BY_NAME = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
_PLAIN = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ToolResult:
    """A call as memory shows it (one line), and its outcome: text, or `error: …`; wall seconds."""

    call: str
    text: str
    error: bool
    seconds: float


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; made by `Tool.of`.

    arguments: JSON schema of what the model gives. timeout: seconds. columns: parameters that come
    from the dataset's row; the model neither sees nor sets them.
    """

    name: str
    description: str
    arguments: dict
    function: Callable
    timeout: float
    columns: tuple[str, ...]
    _adapter: TypeAdapter = field(repr=False, compare=False)

    @classmethod
    def of(cls, function: Callable, *, timeout: float = 5.0, columns: Sequence[str] = ()) -> Tool:
        """Make a tool of a function, or of an object with `__call__` and `__name__`.

        Raises ValueError for a function without name, type hints or full docstring, for parameters
        that cannot be given by name, unknown columns, and a timeout that is not positive.
        """
        # transformers is slow to import, and reading calls does not need it
        from transformers.utils import get_json_schema

        name = getattr(function, "__name__", None) or repr(function)
        if timeout <= 0:
            raise ValueError(f"the timeout of {name} is {timeout} s: give it more than 0.")
        try:
            called = function if inspect.isroutine(function) else function.__call__
            schema = get_json_schema(called)["function"]
            hints = get_type_hints(called, include_extras=True)
            parameters = inspect.signature(called).parameters
            other_kinds = {p.kind for p in parameters.values()} - _BY_NAME
            if not name.isidentifier() or not schema["description"]:
                raise TypeError("it has no callable name, or no description before 'Args:'")
            if other_kinds or inspect.iscoroutinefunction(called):
                raise TypeError("it is a coroutine, or an argument cannot be given by name")
        except Exception as error:  # AttributeError, NameError, and two of transformers' own
            raise ValueError(
                f"{name} is no tool yet ({error}): write a plain function with a name, a type hint "
                "for every parameter, and a Google-style docstring that describes each."
            ) from error
        if unknown := sorted(set(columns) - set(parameters)):
            raise ValueError(f"columns names {unknown}, which {name} does not take: drop them.")
        arguments = schema["parameters"]
        shown = {k: v for k, v in arguments["properties"].items() if k not in columns}
        required = [k for k in arguments.get("required", []) if k in shown]
        # a TypedDict, as a model class has names of its own ("copy", "json") that would collide
        shape = TypedDict(
            name, {k: hints[k] if k in required else NotRequired[hints[k]] for k in shown}
        )
        shape.__pydantic_config__ = ConfigDict(extra="forbid")
        description = " ".join(schema["description"].split())
        arguments = {"type": "object", "properties": shown, "required": required}
        adapter = TypeAdapter(shape)
        return cls(name, description, arguments, function, timeout, tuple(columns), adapter)

    @property
    def sole(self) -> str | None:
        """The argument that `name(text)` gives: the only required one, if it is a string."""
        required = self.arguments["required"]
        types = [self.arguments["properties"][name].get("type") for name in required]
        return required[0] if types == ["string"] else None

    def validate(self, arguments: str | dict) -> dict:
        """The arguments by name, converted to the hinted types; ValueError for a wrong one."""
        if isinstance(arguments, str):
            if not self.sole and (arguments.strip() or self.arguments["required"]):
                raise ValueError(f"call {self.name} with JSON")
            arguments = {self.sole: arguments} if self.sole else {}
        try:
            return self._adapter.validate_python(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            known = {"missing": "missing argument", "extra_forbidden": "unknown argument"}
            if first["type"] in known:
                raise ValueError(f'{known[first["type"]]} "{name}"') from None
            raise ValueError(f"{name}: {first['msg']}") from None


def read_call(text: str) -> tuple[str, str | dict]:
    """Read a call as (tool's name, arguments).

    `lookup(lamp)` gives the text between the first and the last parenthesis as it stands;
    `{"name": "lookup", "arguments": {"query": "lamp"}}` gives a dict, also from within
    `<tool_call>…</tool_call>` or a fence of ```json. Raises ValueError for anything else.
    """
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
    """The tools of an agent, functions or `Tool`s, and the one place where calls are run.

    concurrency: most calls of one `run` at a time. max_result_chars: longer results are cut.
    Raises ValueError without tools, for two of one name, and for limits below 1.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable],
        *,
        concurrency: int = 16,
        max_result_chars: int = 500,
    ):
        tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        self.tools = {tool.name: tool for tool in tools}
        names = [tool.name for tool in tools]
        if not tools or len(self.tools) < len(tools):
            raise ValueError(f"the tools are {names}: give at least one, and each another name.")
        if concurrency < 1 or max_result_chars < 1:
            raise ValueError(f"concurrency is {concurrency}, {max_result_chars=}: give at least 1.")
        self.concurrency, self.max_result_chars = concurrency, max_result_chars

    @property
    def names(self) -> list[str]:
        return list(self.tools)

    def describe(self) -> str:
        """Name, arguments and purpose of every tool, two lines each, for a prompt."""
        lines = []
        for tool in self.tools.values():
            properties = tool.arguments["properties"]
            typed = {name: f"{name}: {_type_text(schema)}" for name, schema in properties.items()}
            for name in set(properties) - set(tool.arguments["required"]):
                typed[name] += " (optional)"
            lines.append(f"{tool.name}({', '.join(typed.values())}): {tool.description}")
            if properties:
                described = (
                    f"{name}: {schema['description']}" for name, schema in properties.items()
                )
                lines.append(f"  {'; '.join(described)}")
        return "\n".join(lines)

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raise ValueError where a tool takes a column that `where` lacks."""
        for tool in self.tools.values():
            if missing := set(tool.columns) - set(columns):
                raise ValueError(
                    f"the tool {tool.name} takes the column {min(missing)!r}, which {where} lacks: "
                    f"add it to the dataset, which has {sorted(columns)}."
                )

    def run(self, calls: Sequence[tuple[str, Mapping]]) -> list[ToolResult]:
        """Run calls, each a (call text, dataset row), in parallel; results in their order.

        A call that has not returned by its tool's timeout is abandoned. Raises ValueError where a
        row lacks a column that a tool takes; nothing that a model wrote raises.
        """
        for _, row in calls:
            self.check_columns(row, "the row")
        results: list[ToolResult | None] = [None] * len(calls)
        waiting: deque[tuple[int, str, Tool, dict]] = deque()
        for i, (text, row) in enumerate(calls):
            shown = _cleaned(text, MAX_CALL_CHARS, one_line=True)
            try:
                name, arguments = read_call(text)
                tool = self.tools.get(name)
                shown = _printable(name, arguments, tool)
                if tool is None:
                    raise ValueError(f'no tool "{name}"')
                arguments = tool.validate(arguments) | {c: row[c] for c in tool.columns}
                waiting.append((i, shown, tool, arguments))
            except (ValueError, RecursionError) as error:
                results[i] = ToolResult(shown, _error_text(error), True, 0.0)

        running: dict[Future, tuple[int, float]] = {}  # the call's place and its deadline
        while waiting or running:
            while waiting and len(running) < self.concurrency:
                i, shown, tool, arguments = waiting.popleft()
                late = f"error: timed out after {tool.timeout:g} s"
                results[i] = ToolResult(shown, late, True, tool.timeout)
                running[_start(tool, arguments)] = (i, time.perf_counter() + tool.timeout)
            next_deadline = min(deadline for _, deadline in running.values())
            done, _ = wait(running, max(next_deadline - time.perf_counter(), 0.0), FIRST_COMPLETED)
            for future in done:
                i, _ = running.pop(future)
                value, failed, seconds = future.result()
                text = _error_text(value) if failed else _cleaned(value, self.max_result_chars)
                results[i] = replace(results[i], text=text, error=failed, seconds=seconds)
            now = time.perf_counter()
            running = {f: place for f, place in running.items() if place[1] > now}
        return results


def _start(tool: Tool, arguments: dict) -> Future:
    """Call the tool in a thread; the future's result is (value, failed, seconds).

    No pool: hung calls would hold the places of later ones for ever.
    """
    future: Future = Future()

    def work() -> None:
        started = time.perf_counter()
        try:
            value, failed = str(tool.function(**arguments)), False
        except BaseException as error:  # also SystemExit: a tool ends no process
            value, failed = error, True
        future.set_result((value, failed, time.perf_counter() - started))

    try:
        # a daemon, or a hung call would keep the process from ending
        threading.Thread(target=work, name=f"tool-{tool.name}", daemon=True).start()
    except RuntimeError as error:  # no threads left
        future.set_result((error, True, 0.0))
    return future


def _error_text(error: BaseException) -> str:
    try:
        reason = str(error)
    except BaseException:
        reason = ""
    # ValueErrors are meant for the reader, others are surprises and say what they are
    if type(error) is not ValueError:
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return f"error: {_cleaned(reason, MAX_REASON_CHARS, one_line=True)}"


def _cleaned(text: str, limit: int, *, one_line: bool = False) -> str:
    """At most `limit` characters, without control, format, surrogate and unassigned ones."""
    kept = (c for c in text if c in "\n\t" or unicodedata.category(c)[0] != "C")
    text = "".join(islice(kept, limit + 1))
    if one_line:
        text = " ".join(text.splitlines())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _printable(name: str, arguments: str | dict, tool: Tool | None) -> str:
    if isinstance(arguments, dict) and tool is not None and list(arguments) == [tool.sole]:
        value = arguments[tool.sole]
        arguments = value if isinstance(value, str) else arguments
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return _cleaned(f"{name}({arguments})", MAX_CALL_CHARS, one_line=True)


def _type_text(schema: dict) -> str:
    if "enum" in schema:
        return "|".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    return "|".join(kind) if isinstance(kind, list) else kind
