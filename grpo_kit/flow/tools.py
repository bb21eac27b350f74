"""Tools: what a model is told of them, how its calls are read, and how they are run with limits.

A tool is a function with type hints and a Google-style docstring, which make its schema. A call is
text that a model wrote: `lookup(lamp)`, as a small one can, or JSON, as larger ones are trained to.
Whatever is wrong with a call becomes a short result, `error: …`, from which the planner can learn;
an exception would end the run.

Limits of time protect a run, not a machine: a call that hangs is abandoned in its thread, which
Python cannot stop. What runs code that a model wrote belongs into a process (`sandbox.PythonTool`).
"""

from __future__ import annotations

import inspect
import json
import queue
import re
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

MAX_CALL_CHARS = 200  # of a call as it is shown in memory
MAX_REASON_CHARS = 100  # of what an error says

_PLAIN = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ToolResult:
    """What a call came to.

    call: as memory shows it, on one line, at most 200 characters. text: what the tool returned, or
    `error: …`. error: whether it is the latter. seconds: that the call took, wall-clock.
    """

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

        Raises ValueError where the name, a type hint, the docstring or the line of an argument in
        it is missing, for parameters that cannot be given by name, and for a timeout that is none.
        """
        # transformers is slow to import, and whoever only reads calls needs none of it
        from transformers.utils import get_json_schema

        name = getattr(function, "__name__", None) or repr(function)
        if timeout <= 0:
            raise ValueError(f"the timeout of {name} is {timeout} s: give it more than 0.")
        try:
            called = function if inspect.isroutine(function) else function.__call__
            schema = get_json_schema(called)["function"]
            hints = get_type_hints(called, include_extras=True)
            parameters = inspect.signature(called).parameters
        except Exception as error:  # AttributeError, NameError, and two of transformers' own
            raise ValueError(
                f"{name} is no tool yet ({error}): give it a name, a type hint for every parameter "
                "and a Google-style docstring that describes each under 'Args:'."
            ) from error
        if not name.isidentifier() or not schema["description"]:
            raise ValueError(
                f"{name} has no name that a call could use, or its docstring says nothing before "
                "'Args:': add what is missing."
            )
        by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        other = [p.name for p in parameters.values() if p.kind not in by_name]
        if other or inspect.iscoroutinefunction(called):
            raise ValueError(
                f"{name} is a coroutine or takes {other} otherwise than by name: write a plain "
                "function whose arguments all have names."
            )
        if unknown := set(columns) - set(parameters):
            raise ValueError(
                f"columns names {sorted(unknown)}, which {name} does not take: it takes "
                f"{sorted(parameters)}."
            )
        arguments = schema["parameters"]
        shown = {k: v for k, v in arguments["properties"].items() if k not in columns}
        required = [k for k in arguments.get("required", []) if k in shown]
        # a TypedDict, as a model class has names of its own ("copy", "json") that would collide
        shape = TypedDict(
            name, {k: hints[k] if k in required else NotRequired[hints[k]] for k in shown}
        )
        shape.__pydantic_config__ = ConfigDict(extra="forbid")
        return cls(
            name=name,
            description=" ".join(schema["description"].split()),
            arguments={"type": "object", "properties": shown, "required": required},
            function=function,
            timeout=timeout,
            columns=tuple(columns),
            _adapter=TypeAdapter(shape),
        )

    @property
    def sole(self) -> str | None:
        """The argument that `name(text)` gives: the only required one, if it is a string."""
        required = self.arguments["required"]
        types = [self.arguments["properties"][name].get("type") for name in required]
        return required[0] if types == ["string"] else None

    def validate(self, arguments: str | dict) -> dict:
        """Return the arguments by name, converted to the function's types.

        Raises ValueError, in few words, for a wrong, missing or unknown one.
        """
        if isinstance(arguments, str):
            if self.sole:
                arguments = {self.sole: arguments}
            elif arguments.strip() or self.arguments["required"]:
                raise ValueError(f"call {self.name} with JSON")
            else:
                arguments = {}
        try:
            return self._adapter.validate_python(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "missing":
                raise ValueError(f'missing argument "{name}"') from None
            if first["type"] == "extra_forbidden":
                raise ValueError(f'unknown argument "{name}"') from None
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
    """The tools of an agent, and the one place where calls are run.

    Args:
        tools: functions or `Tool`s, each of another name.
        concurrency: most calls of one `run` at a time.
        max_result_chars: longer results are cut.

    Raises ValueError for no tool, two of one name, and limits below 1.
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
        if not tools:
            raise ValueError(
                "a toolkit without tools leaves nothing to plan: give it at least one."
            )
        if len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"two tools are called {', '.join(twice)}: rename or drop one.")
        if concurrency < 1 or max_result_chars < 1:
            raise ValueError(
                f"concurrency is {concurrency} and max_result_chars {max_result_chars}: both must "
                "be at least 1."
            )
        self.concurrency = concurrency
        self.max_result_chars = max_result_chars

    @property
    def names(self) -> list[str]:
        return list(self.tools)

    def describe(self) -> str:
        """Name, arguments and purpose of every tool, two lines each, for a prompt."""
        lines = []
        for tool in self.tools.values():
            properties = tool.arguments["properties"]
            optional = set(properties) - set(tool.arguments["required"])
            typed = [
                f"{name}: {_type_text(schema)}" + " (optional)" * (name in optional)
                for name, schema in properties.items()
            ]
            lines.append(f"{tool.name}({', '.join(typed)}): {tool.description}")
            told = [f"{name}: {schema['description']}" for name, schema in properties.items()]
            lines += [f"  {'; '.join(told)}"] if told else []
        return "\n".join(lines)

    def run(self, calls: Sequence[tuple[str, Mapping]]) -> list[ToolResult]:
        """Run calls, each a (call text, dataset row), in parallel; results in their order.

        A call that has not returned by its tool's timeout is abandoned. Raises ValueError where a
        row lacks a column that a tool takes; nothing that a model wrote raises.
        """
        for tool in self.tools.values():
            for _, row in calls:
                if missing := [name for name in tool.columns if name not in row]:
                    raise ValueError(
                        f"{tool.name} takes the column {missing[0]!r}, which the row does not "
                        f"have: add it to the dataset, which has {sorted(row)}."
                    )
        shown: list[str] = []
        results: list[ToolResult | None] = []
        waiting: list[tuple[int, Tool, dict]] = []
        for i, (text, row) in enumerate(calls):
            shown.append(_cleaned(text, MAX_CALL_CHARS, one_line=True))
            results.append(None)
            try:
                name, arguments = read_call(text)
                tool = self.tools.get(name)
                shown[i] = _printable(name, arguments, tool)
                if tool is None:
                    raise ValueError(f'no tool "{name}"')
                given = tool.validate(arguments) | {name: row[name] for name in tool.columns}
                waiting.append((i, tool, given))
            except (ValueError, RecursionError) as error:
                results[i] = ToolResult(shown[i], _error_text(error), True, 0.0)

        # One queue a run: what an abandoned call returns in the end goes to nobody. One thread a
        # call, and no pool, in which hung calls would hold the places of later ones for ever.
        done: queue.SimpleQueue = queue.SimpleQueue()
        deadlines: dict[int, float] = {}
        waiting.reverse()
        while waiting or deadlines:
            while waiting and len(deadlines) < self.concurrency:
                i, tool, given = waiting.pop()
                work = partial(_work, done, i, partial(tool.function, **given))
                deadlines[i] = time.perf_counter() + tool.timeout
                results[i] = ToolResult(
                    shown[i], f"error: timed out after {tool.timeout:g} s", True, tool.timeout
                )
                try:
                    # a daemon, or a hung call would keep the process from ending
                    threading.Thread(target=work, name=f"tool-{tool.name}", daemon=True).start()
                except RuntimeError as error:  # no threads left
                    done.put((i, error, True, 0.0))
            try:
                wait = min(deadlines.values()) - time.perf_counter()
                i, value, failed, seconds = done.get(timeout=max(wait, 0.0))
            except queue.Empty:
                now = time.perf_counter()
                deadlines = {i: end for i, end in deadlines.items() if end > now}
                continue
            if deadlines.pop(i, None) is not None:  # else it was abandoned
                text = _error_text(value) if failed else _cleaned(value, self.max_result_chars)
                results[i] = ToolResult(shown[i], text, failed, seconds)
        return results


def _work(done: queue.SimpleQueue, i: int, call: Callable[[], object]) -> None:
    started = time.perf_counter()
    try:
        value, failed = str(call()), False
    except BaseException as error:  # also SystemExit: a tool ends no process
        value, failed = error, True
    done.put((i, value, failed, time.perf_counter() - started))


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
    """At most `limit` characters of the text, without what is neither seen nor encoded.

    These are control and format characters, lone surrogates and unassigned ones.
    """
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
