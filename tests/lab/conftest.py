"""Records of runs that never were, with known numbers."""

import pytest
from identities import config_today

from grpo_kit.lab.records import Record


@pytest.fixture(scope="session")
def make_record():
    """A record whose accuracy ends at `accuracy`, from 0.25, in two steps of 2 and 3 seconds."""

    def make(arm="plain", seed=0, accuracy=0.5, *, history=None, evaluation=None, **changes):
        if history is None:
            history = [
                {"step": 0, "num_generated_tokens": 0, "eval/pass@1": 0.25, "eval/n": 4},
                {"step": 1, "num_generated_tokens": 90, "reward": accuracy / 2, "entropy": 0.4,
                 "step_time": 2.0},
                {"step": 2, "num_generated_tokens": 200, "reward": accuracy, "entropy": 0.2,
                 "eval/pass@1": accuracy, "eval/n": 4, "step_time": 3.0},
            ]  # fmt: skip
        if evaluation is None:
            evaluation = {"eval/pass@1": accuracy, "eval/n": 4, "entropy": 0.2}
        fields = {
            "experiment": "diversity", "profile": "tiny", "seconds": 5.0,
            "config": config_today(arm, **changes),
            "start": {"collector": "prompts", "rewards": ["accuracy_reward"]},
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "commit": "0123456789ab", "finished": "2026-01-31",
            "machine": {"processor": "a processor", "accelerator": "none", "threads": 1,
                        "system": "Linux"},
            "samples": [{"prompt": "1 + 1?", "completion": "<answer>2</answer>", "right": True}],
        } | changes  # fmt: skip
        return Record(arm=arm, seed=seed, history=history, evaluation=evaluation, **fields)

    return make


@pytest.fixture(scope="session")
def five(make_record):
    """Records of the arms `plain` and `diversity`, a seed an accuracy."""

    def make(plain, other):
        records = [make_record("plain", seed, accuracy) for seed, accuracy in enumerate(plain)]
        return records + [make_record("diversity", s, accuracy) for s, accuracy in enumerate(other)]

    return make
