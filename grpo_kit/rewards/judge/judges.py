"""Who judges: `LocalJudge`, a model in this process, or `EndpointJudge`, a model behind HTTP.

A judge has a `name`, for the cache, and `prompt(question, response)`, messages that ask for a
judgement. Called with conversations it yields (index, `Reply` or `Failure`) for each, in any order.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from pydantic import AliasPath, BaseModel, Field, NonNegativeInt, ValidationError

from grpo_kit.rewards.judge.texts import quality_prompt, tiny_prompt
from grpo_kit.visible import visible

if TYPE_CHECKING:
    from grpo_kit.models import Policy

logger = logging.getLogger(__name__)


class Reply(NamedTuple):
    """What a judge wrote, and how many tokens it read and wrote."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Failure(NamedTuple):
    """Why there is no judgement: a word to count by, and a sentence with the remedy."""

    kind: str
    reason: str
    hopeless: bool = False  # every further call would fail in the same way


Outcomes = AsyncIterator[tuple[int, Reply | Failure]]
_CUT_OFF = Failure("cut off", "the reply reached its limit of tokens: raise it, or think less.")


def commonest_reason(failures: Sequence[Failure]) -> str:
    """The reason that most of the failures give."""
    return Counter(failure.reason for failure in failures).most_common(1)[0][0]


class FailureWindow:
    """Ends a run when more than half of the last `size` replies, called `what`, failed."""

    def __init__(self, size: int, what: str = "judgements"):
        self.size, self.what = size, what
        # whole batches, as failures come last in one: retries take time
        self._batches: deque[tuple[int, int]] = deque(maxlen=size)  # (replies, failures)

    def check(self, failures: Sequence[Failure], total: int) -> None:
        """Raise RuntimeError if, with these of a batch of `total`, most of the window failed."""
        failed = len(failures)
        for replies, losses in reversed(self._batches):
            if total >= self.size:
                break
            total, failed = total + replies, failed + losses
        if total >= self.size and 2 * failed > total:
            problem = f"more than half of the last {total} {self.what} failed ({failed})"
            remedy = "None was scored 0; correct that and resume the run."
            raise RuntimeError(f"{problem}: {commonest_reason(failures)} {remedy}")

    def add(self, failures: Sequence[Failure], total: int) -> None:
        """Add a batch of `total` replies, with a warning about its failures; raises as `check`."""
        if failures:
            kinds = Counter(failure.kind for failure in failures).most_common()
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds)
            failed = f"{len(failures)} of {total} {self.what} failed ({counts})"
            logger.warning("%s: %s", failed, visible(commonest_reason(failures), newline=" "))
            self.check(failures, total)
        self._batches.append((total, len(failures)))


@dataclass(eq=False, repr=False)
class LocalJudge:
    """A frozen copy of a policy, which replies with its most likely tokens, in batches."""

    policy: Policy  # e.g. the tiny base; training it later does not reach the copy
    _: KW_ONLY
    prompt: Callable[[str, str], list[dict]] = tiny_prompt  # `quality_prompt` for other models
    max_new_tokens: int = 96  # the tiny judge needs at most 60
    batch_size: int = 64  # conversations at a time

    def __post_init__(self):
        from grpo_kit.models import frozen_copy, weights_hash

        self.policy = frozen_copy(self.policy)
        # training moves every weight, so a sample of them identifies the judge
        weights = weights_hash(self.policy.model.parameters(), samples=256)
        self.name = f"local-{weights}-{self.max_new_tokens}"

    async def __call__(self, conversations: Sequence[list[dict]]) -> Outcomes:
        from grpo_kit.generation import reply

        room = self.policy.context_length - self.max_new_tokens
        lengths = [len(ids) for ids in self.policy.encode(conversations)]
        for i, length in enumerate(lengths):
            if length > room:
                reason = f"the judge has room for {room} tokens and the prompt has {length}: "
                yield i, Failure("too long", reason + "lower max_completion_length.")
        if not (fitting := [i for i, length in enumerate(lengths) if length <= room]):
            return
        limits = {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
        fit = [conversations[i] for i in fitting]
        # in a thread, or other coroutines' clocks would run out meanwhile
        rollouts = await asyncio.to_thread(reply, self.policy, fit, **limits, do_sample=False)
        rows = rollouts.completion_lists()
        texts, finished = self.policy.decode(rows), rollouts.finished.tolist()
        for i, text, row, ended in zip(fitting, texts, rows, finished, strict=True):
            yield i, Reply(text, lengths[i], len(row)) if ended else _CUT_OFF


REQUEST = {"temperature": 0.0, "max_tokens": 1024}


class _Completion(BaseModel):
    """What is read of an answer; endpoints differ in the rest, and the client checks nothing."""

    message: dict = Field(validation_alias=AliasPath("choices", 0, "message"))  # is there one?
    text: str | None = Field(None, validation_alias=AliasPath("choices", 0, "message", "content"))
    ended_by: str | None = Field(None, validation_alias=AliasPath("choices", 0, "finish_reason"))
    read: NonNegativeInt = Field(0, validation_alias=AliasPath("usage", "prompt_tokens"))
    written: NonNegativeInt = Field(0, validation_alias=AliasPath("usage", "completion_tokens"))


@dataclass(eq=False, repr=False)
class EndpointJudge:
    """A model behind an OpenAI-compatible endpoint: vLLM, `transformers serve`, Ollama, a host's.

    The openai client retries rate limits, server errors, time-outs and broken connections; a call
    ends after `timeout * (max_retries + 1) + 8 * max_retries` seconds. Raises ValueError for an
    unusable base_url or key, and numbers out of range.
    """

    model: str  # its name at the endpoint
    _: KW_ONLY
    base_url: str  # http://127.0.0.1:8000/v1 (vLLM), http://127.0.0.1:11434/v1 (Ollama)
    api_key_env: str | None = "OPENAI_API_KEY"  # the variable, read at every call; None = no key
    prompt: Callable[[str, str], list[dict]] = quality_prompt
    concurrency: int = 8  # most requests at a time
    timeout: float = 60.0  # seconds that one attempt may be silent
    max_retries: int = 4
    request: dict | None = None  # further fields of the request; None = `REQUEST`

    def __post_init__(self):
        url = urlsplit(self.base_url or "")
        if url.scheme not in ("http", "https") or url.username or url.password or url.query:
            problem = "base_url must be like http://127.0.0.1:8000/v1, no user, password or query"
            raise ValueError(f"{problem}: keys come from the environment only, by api_key_env.")
        for name, least in {"concurrency": 1, "timeout": 0.001, "max_retries": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: give {least} or more.")
        self._key()
        # one of each event loop: parts of a batch may be judged at the same time
        self._gates: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.request = dict(REQUEST if self.request is None else self.request)
        # the request changes replies; hashed, as somebody may put a header with a key there
        digest = hashlib.sha256(json.dumps(self.request, sort_keys=True).encode()).hexdigest()
        self.name = f"{self.model}-{digest[:8]}"

    def _key(self) -> str:
        if self.api_key_env is None:
            return "no-key-wanted"  # the client insists on one
        key = os.environ.get(self.api_key_env, "").strip()
        if not key or not (key.isascii() and key.isprintable()) or " " in key:
            problem = f"the environment variable {self.api_key_env} is not set, or no ASCII word"
            raise ValueError(f"{problem}: set it, or give api_key_env=None if no key is wanted.")
        return key

    async def __call__(self, conversations: Sequence[list[dict]]) -> Outcomes:
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as error:
            raise RuntimeError("the judge needs openai: pip install 'grpo-kit[judge]'.") from error
        key = self._key()
        loop = asyncio.get_running_loop()
        gate = self._gates.setdefault(loop, asyncio.Semaphore(self.concurrency))
        options = {"timeout": self.timeout, "max_retries": self.max_retries}
        # A client belongs to one event loop, and the kit's training has one a step.
        # It follows nobody elsewhere: prompts are for this address.
        options["http_client"] = DefaultAsyncHttpxClient(follow_redirects=False)
        async with AsyncOpenAI(api_key=key, base_url=self.base_url, **options) as client:

            async def judged(i: int, messages: list[dict]) -> tuple[int, Reply | Failure]:
                async with gate:
                    return i, await self._ask(client, key, messages)

            tasks = [asyncio.create_task(judged(i, c)) for i, c in enumerate(conversations)]
            try:
                for task in asyncio.as_completed(tasks):
                    yield await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client, key: str, messages: list[dict]) -> Reply | Failure:
        import openai

        limit = self.timeout * (self.max_retries + 1) + 8 * self.max_retries
        create = client.chat.completions.with_raw_response.create
        call = create(model=self.model, messages=messages, **self.request)
        try:
            answer = await asyncio.wait_for(call, limit)
            completion = _Completion.model_validate_json(answer.content)
        except ValidationError:
            reason = f"{self.base_url} answered with no chat completion: does it end in /v1?"
            return Failure("no completion", reason)
        except (asyncio.TimeoutError, openai.OpenAIError) as error:
            return self._failure(error, key)
        text, ended_by = completion.text or "", completion.ended_by
        if ended_by == "length":
            return _CUT_OFF
        if not text.strip():
            reason = f"{self.model} ended by {ended_by!r} without text: switch off its thinking."
            return Failure("empty", reason)
        return Reply(text.replace(key, "[key]"), completion.read, completion.written)

    def _failure(self, error: Exception, key: str) -> Failure:
        """The error's kind, remedy and the server's own message, but without the key."""
        import openai

        url, status = self.base_url, getattr(error, "status_code", None)
        if isinstance(error, asyncio.TimeoutError | openai.APITimeoutError):
            problem = f"{url} did not answer within timeout={self.timeout} s"
            return Failure("timeout", f"{problem}: raise it or lower concurrency.")
        # by name, since the openai client changed its HTTP library between versions
        if type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout"):
            reason = f"no server can be reached at {url}: start it or correct base_url."
            return Failure("unreachable", reason, hopeless=True)
        message = " ".join(str(error).replace(key, "[key]").split())[:200]
        if status is None:
            return Failure("connection", f"the connection to {url} broke off. {message}")
        kind, remedy = "server error" if status >= 500 else "refused", "read the server's log"
        if 300 <= status < 400:
            kind = "redirected"
            remedy = "it leads elsewhere; if you trust that, give it as base_url"
        elif status in (401, 403):
            kind, remedy = "key refused", f"set a valid key as {self.api_key_env or 'api_key_env'}"
        elif status == 404:
            kind, remedy = "not served", f"it does not serve {self.model}; {url}/models lists names"
        elif status == 429:
            kind, remedy = "rate limit", "lower concurrency or raise max_retries"
        reason = f"{url} answered HTTP {status}: {remedy}. {message}"
        return Failure(kind, reason, hopeless=status in (401, 403, 404) or kind == "redirected")
