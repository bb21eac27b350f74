"""Who judges: `LocalJudge`, a model in this process, or `EndpointJudge`, a model behind HTTP.

A judge is any object with three things; a test's or a reader's own needs no more:

name      of the model, by which its judgements are cached
prompt    `prompt(question, response)` -> the messages that ask for a judgement
__call__  `judge(conversations)` -> an async iterator of (index, `Reply` or `Failure`), one for
          each conversation, in any order: whatever is done can be kept before the rest is

A judgement that cannot be had is a `Failure`, never an exception, which would end the run.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from grpo_kit.rewards.judge.texts import quality_prompt, tiny_prompt

if TYPE_CHECKING:
    from grpo_kit.models import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """What a judge wrote, and how many tokens it read and wrote."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Failure:
    """Why there is no judgement.

    kind: a word or two to count by. reason: a sentence that says what to do. hopeless: every
    further call would fail in the same way (no server, wrong key, unknown model).
    """

    kind: str
    reason: str
    hopeless: bool = False


def commonest_reason(failures: Sequence[Failure]) -> str:
    """The reason that most of the failures give."""
    return Counter(failure.reason for failure in failures).most_common(1)[0][0]


class FailureWindow:
    """Ends a run when more than half of the last replies failed.

    It counts whole batches: within one the failures come last, since they take retries' time.

    Args:
        size: replies to count over, rounded up to whole batches.
        what: the plural that names the replies in messages.

    Raises ValueError for a size below 1.
    """

    def __init__(self, size: int, what: str = "judgements"):
        if size < 1:
            raise ValueError(f"failure_window is {size}; count over 1 reply or more.")
        self.size, self.what = size, what
        self._batches: deque[tuple[int, Counter[str]]] = deque(maxlen=size)

    def check(self, failures: Sequence[Failure], total: int) -> None:
        """Raise RuntimeError if, with these of a batch of `total`, most of the window failed."""
        kinds = Counter(failure.kind for failure in failures)
        for earlier_total, earlier_kinds in reversed(self._batches):
            if total >= self.size:
                break
            total += earlier_total
            kinds += earlier_kinds
        if total >= self.size and 2 * kinds.total() > total:
            raise RuntimeError(
                f"more than half of the last {total} {self.what} failed ({_counts(kinds)}): "
                f"{commonest_reason(failures)} No failure was scored 0; correct the cause and "
                "resume the run."
            )

    def add(self, failures: Sequence[Failure], total: int) -> None:
        """Add a batch of `total` replies, with a warning about its failures; raises as `check`."""
        kinds = Counter(failure.kind for failure in failures)
        if failures:
            logger.warning(
                "%d of %d %s failed (%s): %s",
                len(failures), total, self.what, _counts(kinds), commonest_reason(failures),
            )  # fmt: skip
            self.check(failures, total)
        self._batches.append((total, kinds))


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


_CUT_OFF = Failure(
    "cut off", "the reply reached its limit of tokens: raise it, or keep the judge from thinking."
)


class LocalJudge:
    """A frozen copy of a policy, which replies with its most likely tokens, in batches.

    Args:
        policy: e.g. the tiny base before training; later training of it does not reach the copy.
        prompt: `tiny_prompt`, or `quality_prompt` for a model that was not made for the former.
        max_new_tokens: limit of a reply; the tiny judge's are at most 60 long.
        batch_size: conversations at a time.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        prompt: Callable[[str, str], list[dict]] = tiny_prompt,
        max_new_tokens: int = 96,
        batch_size: int = 64,
    ):
        from grpo_kit.models import frozen_copy

        self.policy = frozen_copy(policy)
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        weights = hashlib.sha256()
        for parameter in self.policy.model.parameters():
            values = parameter.flatten()
            sample = values[:: max(1, len(values) // 256)]  # training moves every weight
            weights.update(sample.float().cpu().numpy().tobytes())
        self.name = f"local-{weights.hexdigest()[:12]}-{max_new_tokens}"

    async def __call__(
        self, conversations: Sequence[list[dict]]
    ) -> AsyncIterator[tuple[int, Reply | Failure]]:
        room = self.policy.context_length - self.max_new_tokens
        encoded = self.policy.encode(conversations)
        fitting = [i for i, ids in enumerate(encoded) if len(ids) <= room]
        for i, ids in enumerate(encoded):
            if len(ids) > room:
                yield (
                    i,
                    Failure(
                        "too long",
                        f"the judge has room for {room} tokens and the prompt has {len(ids)}: "
                        "lower max_completion_length.",
                    ),
                )
        for start in range(0, len(fitting), self.batch_size):
            part = fitting[start : start + self.batch_size]
            # in a thread, or other coroutines' clocks would run out meanwhile
            replies = await asyncio.to_thread(self._reply, [encoded[i] for i in part])
            for i, reply in zip(part, replies, strict=True):
                yield i, reply

    def _reply(self, prompt_ids: list[list[int]]) -> list[Reply | Failure]:
        from grpo_kit.generation import generate

        with self.policy.autocast():
            rollouts = generate(
                self.policy.model,
                prompt_ids,
                max_new_tokens=self.max_new_tokens,
                eos_token_ids=self.policy.eos_token_ids,
                pad_token_id=self.policy.pad_token_id,
                do_sample=False,
            )
        ids = rollouts.completion_lists()
        texts, ended = self.policy.decode(ids), rollouts.finished.tolist()
        return [
            Reply(text, len(prompt), len(own)) if whole else _CUT_OFF
            for text, prompt, own, whole in zip(texts, prompt_ids, ids, ended, strict=True)
        ]


# Of each judge and event loop: parts of a batch may be judged at the same time.
_GATES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
REQUEST = {"temperature": 0.0, "max_tokens": 1024}


class EndpointJudge:
    """A model behind an OpenAI-compatible endpoint: vLLM, `transformers serve`, Ollama, a host's.

    Rate limits (429), server errors, time-outs and broken connections are tried again by the openai
    client, with exponential backoff and jitter, or as the server's Retry-After says. Judgements are
    cached by model and request, whatever the address.

    Args:
        model: its name at the endpoint.
        base_url: e.g. `http://127.0.0.1:8000/v1` (vLLM), `http://127.0.0.1:11434/v1` (Ollama).
        api_key_env: the environment variable that holds the key, read at every call and kept
            nowhere; None for an endpoint that wants none.
        prompt: `quality_prompt`, or `tiny_prompt` for a served tiny base.
        concurrency: most requests at a time.
        timeout: seconds that one attempt may be silent. All attempts and the pauses between them
            end after `timeout * (max_retries + 1) + 8 * max_retries` seconds.
        max_retries: further attempts.
        request: what is sent along, in place of `REQUEST`. `{**REQUEST, "extra_body":
            {"chat_template_kwargs": {"enable_thinking": False}}}` keeps Qwen3 from thinking.

    Raises ValueError for a base_url that is none or carries a password, a missing model name, a
    key that is not set or cannot be sent, and numbers out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        api_key_env: str | None = "OPENAI_API_KEY",
        prompt: Callable[[str, str], list[dict]] = quality_prompt,
        concurrency: int = 8,
        timeout: float = 60.0,
        max_retries: int = 4,
        request: dict | None = None,
    ):
        url = urlsplit(base_url or "")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                "base_url is missing or no address: give that of an OpenAI-compatible endpoint, "
                "such as http://127.0.0.1:8000/v1."
            )
        if url.username or url.password or url.query:
            raise ValueError(
                f"the base_url at {url.hostname} carries a user, password or query: keys come from "
                "the environment only, name the variable as api_key_env."
            )
        if not model:
            raise ValueError(f"model is {model!r}: name one that {base_url} serves.")
        if concurrency < 1 or timeout <= 0 or max_retries < 0:
            raise ValueError(
                f"concurrency is {concurrency}, timeout {timeout}, max_retries {max_retries}: "
                "at least 1, more than 0 and at least 0 are wanted."
            )
        self.model = model
        self.base_url = base_url
        self.api_key_env = api_key_env
        self.prompt = prompt
        self.concurrency = concurrency
        self.timeout = timeout
        self.max_retries = max_retries
        self.request = dict(REQUEST if request is None else request)
        self._key()
        # what is sent along changes replies; hashed, as somebody may put a header with a key there
        sent = hashlib.sha256(json.dumps(self.request, sort_keys=True).encode()).hexdigest()[:8]
        self.name = f"{model}-{sent}"

    def _key(self) -> str:
        if self.api_key_env is None:
            return "no-key-wanted"  # the client insists on one
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(
                f"the environment variable {self.api_key_env} with the key for {self.base_url} is "
                "not set: set it, or give api_key_env=None for an endpoint that wants no key."
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(
                f"the environment variable {self.api_key_env} holds something else than a key "
                "(spaces, line breaks or letters outside ASCII): set it again."
            )
        return key

    async def __call__(
        self, conversations: Sequence[list[dict]]
    ) -> AsyncIterator[tuple[int, Reply | Failure]]:
        try:
            from openai import AsyncOpenAI
        except ImportError:
            raise RuntimeError(
                "a judge behind an endpoint needs the openai client: pip install 'grpo-kit[judge]'."
            ) from None
        key = self._key()
        gates = _GATES.setdefault(self, weakref.WeakKeyDictionary())
        gate = gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        # A client belongs to the event loop that it was first used in, and loops come and go: the
        # kit's training has one a step.
        async with AsyncOpenAI(
            api_key=key, base_url=self.base_url, timeout=self.timeout, max_retries=self.max_retries
        ) as client:

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
        try:
            answer = await asyncio.wait_for(
                create(model=self.model, messages=messages, **self.request), limit
            )
            completion = _Completion.model_validate_json(answer.content)
        except ValidationError:
            return Failure(
                "no completion",
                f"{self.base_url} answered, but not with a chat completion: is it the address of "
                "an OpenAI-compatible endpoint, with its /v1?",
            )
        except (asyncio.TimeoutError, openai.OpenAIError) as error:
            return self._failure(error, key)
        choice = completion.choices[0]
        if choice.finish_reason == "length":
            return _CUT_OFF
        if not (choice.message.content or "").strip():
            return Failure(
                "empty",
                f"{self.model} replied with no text (it ended by {choice.finish_reason!r}): ask it "
                "by hand, and if it thinks, switch thinking off.",
            )
        usage = completion.usage or _Usage()
        text = choice.message.content.replace(key, "[key]")
        return Reply(text, usage.prompt_tokens, usage.completion_tokens)

    def _failure(self, error: Exception, key: str) -> Failure:
        """The error as something to count and a sentence; what the server said without the key."""
        import openai

        said = " ".join(str(error).replace(key, "[key]").split())[:200]
        if isinstance(error, asyncio.TimeoutError | openai.APITimeoutError):
            return Failure(
                "timeout",
                f"{self.base_url} did not answer within {self.timeout} s, {self.max_retries + 1} "
                "time(s): raise timeout or lower concurrency.",
            )
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            return Failure(
                "key refused",
                f"{self.base_url} refuses the key (HTTP {status}): set the environment variable "
                f"{self.api_key_env or 'that you name as api_key_env'} to a valid one. {said}",
                hopeless=True,
            )
        if status == 404:
            return Failure(
                "not served",
                f"{self.base_url} does not serve {self.model} (HTTP 404); {self.base_url}/models "
                f"lists what it serves. {said}",
                hopeless=True,
            )
        if status == 429:
            return Failure("rate limit", f"lower concurrency or raise max_retries. {said}")
        if status is not None:
            kind = "server error" if status >= 500 else "refused"
            return Failure(kind, f"{self.base_url} answered HTTP {status}. {said}")
        # by name, as the client has changed its HTTP library under way
        if type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout"):
            return Failure(
                "unreachable",
                f"no server can be reached at {self.base_url}: start it or correct base_url.",
                hopeless=True,
            )
        return Failure("connection", f"the connection to {self.base_url} broke off. {said}")


# What is read of an endpoint's answer. Less strict than openai's own types, since endpoints differ
# in the rest, and stricter than what its client checks, which is nothing.
class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None
