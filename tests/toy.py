"""A toy task, a reward with spread in every group and a small config, for tests of the loop."""

import contextlib
import dataclasses
import functools
import itertools
import json
import resource
import signal

import torch
from datasets import Dataset

from grpo_kit.config import GRPOConfig
from grpo_kit.runs import HISTORY
from grpo_kit.self_verification import VerificationItem
from grpo_kit.tasks import Task

CONFIG = GRPOConfig(
    max_steps=3, learning_rate=1e-3, lr_scheduler_type="constant", num_generations=4,
    generation_batch_size=8, max_completion_length=8, eval_prompts=2, num_generations_eval=2,
    save_steps=1,
)  # fmt: skip


def configure(**changes) -> GRPOConfig:
    return dataclasses.replace(CONFIG, **changes)


def rows(n: int) -> Dataset:
    prompts = [[{"role": "user", "content": f"{'a' * i} {i}"}] for i in range(n)]
    columns = {"prompt": prompts, "answer": [str(i) for i in range(n)], "row": list(range(n))}
    return Dataset.from_dict(columns)


TASK = Task("toy", rows(6), rows(3))


def even_ids(prompts, completions, completion_ids, **columns):
    """The share of even token ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def all_right(completions, **columns):
    """A measure to which every completion is right."""
    return [1.0] * len(completions)


class Letters:
    """An embedder that counts some letters, `least` or more of each."""

    def __init__(self, letters="xyz", least=0.0):
        self.letters, self.least = letters, least

    def encode(self, texts):
        return [[text.count(letter) + self.least for letter in self.letters] for text in texts]


def plain_logps(model, prompt, completion, temperature=1.0):
    """One row, no padding, no cache: log-softmax of the whole vocabulary at every position."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    logps = torch.log_softmax(logits / temperature, -1)
    return logps.gather(1, torch.tensor(completion)[:, None])[:, 0]


def killed_in(call: int, reward=even_ids):
    """`reward`, whose call of this number, from 0, ends the run as a signal would."""
    calls = itertools.count()

    @functools.wraps(reward)
    def deadly(*arguments, **columns):
        if next(calls) == call:
            raise KeyboardInterrupt
        return reward(*arguments, **columns)

    return deadly


@contextlib.contextmanager
def files_up_to(limit: int):
    """No file may grow beyond so many bytes: a write fails as on a full disk."""
    size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        signal.signal(signal.SIGXFSZ, before)


def weights_of(policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def without_times(history: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if "time" not in k} for row in history]


def logged(folder) -> list[dict]:
    """The history of a run as it lies on the disk."""
    return [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]


def items_of(query, right: int, wrong: int) -> list[VerificationItem]:
    """Items of one query, each with an answer of its own, so that they can be told apart."""
    return [
        VerificationItem(query, f"q{query}", f"{query}-{i}", i < right)
        for i in range(right + wrong)
    ]
