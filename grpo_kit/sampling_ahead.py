"""Asynchronous sampling on two cores: a second process samples the next batch during an update.

From the second step on, the policy that sampled a batch is one step older than the policy that
learns from it. Weighting each token by min(pi / pi_sampler, C) corrects for that: truncated
importance sampling; C is the config's `importance_sampling_cap`. AReaL (arXiv 2505.24298) does this
on many GPUs. Free to change here: how the two processes talk. Not: which weights and which random
numbers a batch is sampled with.
"""

from __future__ import annotations

import copy
import pickle
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import get_context

from grpo_kit.backends import sample_groups
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import Rollouts
from grpo_kit.models import Policy, frozen_copy

if TYPE_CHECKING:  # at run time it would double the seconds until the process can sample
    from grpo_kit.training import Batch, PromptBatches


class SamplingAhead:
    """A batch source for `train`: batch t + 1 is sampled while the run learns from batch t.

    It is sampled by a process of one thread, with the weights from before update t and a seed from
    the run's generator, so a run depends on no timing. Leave that process a core: with two, call
    `torch.set_num_threads(1)`. A script must train under `if __name__ == "__main__":`, since the
    process imports the script. With `importance_sampling_cap` None the age of a batch is ignored.

    Raises ValueError on a GPU and for a config that samples a batch in parts; RuntimeError in a
    step where the process has ended.
    """

    name = "sampling ahead"

    def __init__(self, prompts: PromptBatches) -> None:
        config, device = prompts.config, prompts.policy.device.type
        if device != "cpu":
            problem = f"sampling ahead is for a CPU, and this policy is on {device!r}"
            raise ValueError(f"{problem}: there vLLM samples for TRL (--engine trl --vllm server).")
        for setting, needed in (("dynamic_sampling_rounds", 0), ("rollout_chunks", 1)):
            if (value := getattr(config, setting)) != needed:
                raise ValueError(f"{setting} is {value}; sampling ahead needs {needed}.")
        self.prompts = prompts
        self.worker: _Worker | None = None  # started when it is first needed
        self.asked = False  # whether the next batch is being sampled
        self.rollouts: Rollouts | None = None  # of the next batch, where they have arrived

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        is_last = state.global_step + 1 == state.max_steps
        sample = partial(self._sample, generator=generator, is_last=is_last)
        try:
            yield from self.prompts(generator, state, metrics, sample=sample)
        except BaseException:  # GeneratorExit too: the update failed
            self.worker = None  # a traceback would keep it
            raise

    def _sample(self, prompt_ids: list, generator: torch.Generator, is_last: bool) -> Rollouts:
        """This batch's rollouts; the next batch is under way when it returns."""
        policy, config = self.prompts.policy, self.prompts.config
        rollouts = self._arrived() or sample_groups(policy, prompt_ids, config, generator)
        self.rollouts = None
        if is_last:
            self.worker = None
            return rollouts
        self.worker = self.worker or _Worker(policy, config)
        ahead = copy.copy(self.prompts)  # the prompts count as taken when their step comes
        next_ids = [ahead.prompt_ids[row] for row in ahead.take(len(prompt_ids))]
        self.worker.ask(next_ids, seed=int(torch.randint(2**62, (1,), generator=generator)))
        self.asked = True
        return rollouts

    def _arrived(self) -> Rollouts | None:
        """The next batch's rollouts, waited for where they are under way."""
        if self.asked:
            self.rollouts, self.asked = self.worker.answer(), False
        return self.rollouts

    def state_dict(self) -> dict:
        rollouts = self._arrived()
        return {"prompts": self.prompts.state_dict(), "rollouts": rollouts and vars(rollouts)}

    def load_state_dict(self, state: dict) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.rollouts = Rollouts(**state["rollouts"]) if state["rollouts"] else None


class _Worker:
    """The process that samples; it ends with this object. Its policy lies in shared memory."""

    def __init__(self, policy: Policy, config: GRPOConfig) -> None:
        self.policy, self.copy = policy, frozen_copy(policy)
        self.copy.model.share_memory()
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        weakref.finalize(self, _end, self.process)
        self._talk(self.connection.send, (self.copy, config))

    @torch.no_grad()
    def ask(self, prompt_ids: list, seed: int) -> None:
        """Let it sample with the weights as they are now. It must be idle."""
        parameters = self.policy.model.parameters(), self.copy.model.parameters()
        for own, shared in zip(*parameters, strict=True):
            if own.requires_grad:
                shared.copy_(own)
        self._talk(self.connection.send, (prompt_ids, seed))

    def answer(self) -> Rollouts:
        return pickle.loads(self._talk(self.connection.recv_bytes))

    def _talk(self, call: Callable, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (EOFError, ConnectionError):
            self.process.join()
            problem = f"the process that samples ahead ended with exit code {self.process.exitcode}"
            reason = "-9: killed, perhaps for lack of memory; 1: see its error above"
            raise RuntimeError(f"{problem} ({reason}): resume from the last checkpoint.") from None


def _end(process: Any) -> None:
    process.terminate()
    process.join()


def _serve(connection: Any) -> None:
    """What the process does: sample what it is asked for until nobody is left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends it without a traceback
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        policy, config = connection.recv()
        while True:
            prompt_ids, seed = connection.recv()
            generator = torch.Generator().manual_seed(seed)
            rollouts = sample_groups(policy, prompt_ids, config, generator)
            # as bytes: tensors by themselves would stay in this process's shared memory
            connection.send_bytes(pickle.dumps(rollouts))
