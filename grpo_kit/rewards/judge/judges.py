"""Who judges: `LocalJudge`, a model in this process, or `EndpointJudge`, a model behind HTTP.

A judge has a `name`, for the cache, and `prompt(question, response)`, messages that ask for a
judgement. Awaited with conversations it returns a reply or a `Failure` for each.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from grpo_kit.rewards.judge.texts import quality_prompt, tiny_prompt

if TYPE_CHECKING:
    from grpo_kit.models import Policy


class Failure(NamedTuple):
    """Why there is no judgement: a word to count by, and a sentence with the remedy."""

    kind: str
    reason: str


_CUT_OFF = Failure("cut off", "the reply reached its limit of tokens: raise it, or think less.")


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

    async def __call__(self, conversations: Sequence[list[dict]]) -> list[str | Failure]:
        from grpo_kit.generation import reply

        room = self.policy.context_length - self.max_new_tokens
        lengths = [len(ids) for ids in self.policy.encode(conversations)]
        reason = f"the judge has room for {room} tokens: lower max_completion_length."
        outcomes: list[str | Failure] = [Failure("too long", reason)] * len(lengths)
        fitting = [i for i, length in enumerate(lengths) if length <= room]
        if not fitting:
            return outcomes
        limits = {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
        fit = [conversations[i] for i in fitting]
        # in a thread, or other coroutines' clocks would run out meanwhile
        rollouts = await asyncio.to_thread(reply, self.policy, fit, **limits, do_sample=False)
        texts = self.policy.decode(rollouts.completion_lists())
        for i, text, ended in zip(fitting, texts, rollouts.finished.tolist(), strict=True):
            outcomes[i] = text if ended else _CUT_OFF
        return outcomes


REQUEST = {"temperature": 0.0, "max_tokens": 1024}


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

    async def __call__(self, conversations: Sequence[list[dict]]) -> list[str | Failure]:
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as error:
            raise RuntimeError("the judge needs openai: pip install 'grpo-kit[judge]'.") from error
        key = self._key()
        gate = asyncio.Semaphore(self.concurrency)
        options = {"timeout": self.timeout, "max_retries": self.max_retries}
        # A client belongs to one event loop, and the kit's training has one a step.
        # It follows nobody elsewhere: prompts are for this address.
        options["http_client"] = DefaultAsyncHttpxClient(follow_redirects=False)
        async with AsyncOpenAI(api_key=key, base_url=self.base_url, **options) as client:
            calls = (self._ask(client, gate, key, messages) for messages in conversations)
            return await asyncio.gather(*calls)

    async def _ask(self, client, gate, key: str, messages: list[dict]) -> str | Failure:
        import openai

        limit = self.timeout * (self.max_retries + 1) + 8 * self.max_retries
        create = client.chat.completions.with_raw_response.create
        call = create(model=self.model, messages=messages, **self.request)
        try:
            async with gate:
                answer = await asyncio.wait_for(call, limit)
            choice = json.loads(answer.content)["choices"][0]  # whatever content type it has
            text, ended_by = str(choice["message"]["content"] or ""), choice.get("finish_reason")
        except (TimeoutError, openai.OpenAIError) as error:
            return self._failure(error, key)
        except (AttributeError, LookupError, TypeError, ValueError):
            reason = f"{self.base_url} answered with no chat completion: does it end in /v1?"
            return Failure("no completion", reason)
        if ended_by == "length":
            return _CUT_OFF
        if not text.strip():
            reason = f"{self.model} ended by {ended_by!r} without text: switch off its thinking."
            return Failure("empty", reason)
        return text.replace(key, "[key]")

    def _failure(self, error: Exception, key: str) -> Failure:
        """The error's kind, the message without the key, and a remedy."""
        import openai

        kind = f"HTTP {getattr(error, 'status_code', 'error')}"
        remedy = "look at the server's log, base_url and model"
        if isinstance(error, TimeoutError | openai.APITimeoutError):
            kind, remedy = "timeout", f"raise timeout={self.timeout} or lower concurrency"
        elif isinstance(error, openai.APIConnectionError):
            kind, remedy = "unreachable", "start the server or correct base_url"
        elif isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            kind, remedy = "key refused", f"set a valid one as {self.api_key_env}"
        elif isinstance(error, openai.RateLimitError):
            kind, remedy = "rate limit", "lower concurrency or raise max_retries"
        message = " ".join(str(error).replace(key, "[key]").split())[:200] or "no answer in time"
        return Failure(kind, f"{self.base_url}: {message.rstrip('.')}: {remedy}.")
