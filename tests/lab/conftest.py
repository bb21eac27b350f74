"""Records of runs that never were, with known numbers; and a profile whose runs take seconds."""

import dataclasses

import pytest

from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.records import Record
from grpo_kit.profiles import PROFILES


def config_today(arm: str, experiment: str = "diversity", profile: str = "tiny", **rest) -> dict:
    """What the kit would run today as this arm; a small config for what it does not know."""
    known = EXPERIMENTS.get(experiment)
    if known is None or arm not in known.arms or profile not in PROFILES:
        return {"max_steps": 2, "generation_batch_size": 8, "learning_rate": 2e-4}
    return known.identity(PROFILES[profile], arm)


@pytest.fixture(scope="session")
def make_record():
    """A record whose accuracy ends at `accuracy`, from 0.25, in two steps of 2 and 3 seconds."""

    def make(arm="plain", seed=0, accuracy=0.5, **changes):
        fields = {
            "experiment": "diversity", "profile": "tiny", "seconds": 5.0,
            "config": config_today(arm, **changes),
            "start": {"batch_source": "prompts", "rewards": ["accuracy_reward", arm]},
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "commit": "0123456789ab", "finished": "2026-01-31",
            "machine": {"processor": "a processor", "accelerator": "none", "threads": 1,
                        "system": "Linux"},
            "evaluation": {"eval/pass@1": accuracy, "eval/n": 4, "entropy": 0.2},
            "history": [
                {"step": 0, "num_generated_tokens": 0, "eval/pass@1": 0.25, "eval/n": 4},
                {"step": 1, "num_generated_tokens": 90, "reward": accuracy / 2, "entropy": 0.4,
                 "step_time": 2.0},
                {"step": 2, "num_generated_tokens": 200, "reward": accuracy, "entropy": 0.2,
                 "eval/pass@1": accuracy, "eval/n": 4, "step_time": 3.0},
            ],
            "samples": [{"prompt": "1 <b>+</b>\n\n1?", "right": True,
                         "completion": "<script>alert(1)</script>\n\n2</pre>"}],
        } | changes  # fmt: skip
        return Record(arm=arm, seed=seed, **fields)

    return make


@pytest.fixture(scope="session")
def five(make_record):
    """Records of the arms `plain` and `diversity`, a seed an accuracy."""

    def make(plain, other, **changes):
        return [
            make_record(arm, seed, accuracy, **changes)
            for arm, accuracies in (("plain", plain), ("diversity", other))
            for seed, accuracy in enumerate(accuracies)
        ]

    return make


@pytest.fixture
def profile(saved_policy):
    """`smoke` with an untrained policy, of two steps."""
    config = dataclasses.replace(
        PROFILES["smoke"].config, max_steps=2, max_completion_length=6, eval_prompts=2, save_steps=1
    )
    return dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy), config=config)
