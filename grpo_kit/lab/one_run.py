"""One run of plain GRPO, by the kit's trainer or by TRL's: `grpo-kit train`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_kit.course.replay import Recorder
from grpo_kit.models import save_policy
from grpo_kit.profiles import Profile
from grpo_kit.rewards import accuracy_reward, format_reward


def train_once(
    profile: Profile, *, engine: str, output_dir: Path, rewards: Sequence[Callable] = (),
    replay: bool = False, **options: Any,
) -> Path | None:  # fmt: skip
    """Train the profile's policy on its task, by accuracy and format unless `rewards` are given.

    `replay` records what `grpo-kit replay` shows (kit only); the other options are `train`'s.
    Returns the folder of the trained policy, and None in all processes of a run but the first.
    Raises ValueError where engine and options do not fit.
    """
    if replay and engine == "trl":
        raise ValueError("--replay is for the kit's trainer: leave out --engine trl.")
    if engine == "kit" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the kit's trainer runs in one process: add --engine trl for several.")
    task = profile.load_task()  # before the model: a folder may be missing
    if engine == "kit":
        from grpo_kit import training as trainer

        if replay:
            options["record"] = Recorder(output_dir)
    else:
        from grpo_kit import trl_bridge as trainer

        trainer.join(profile.device)
    policy, rewards = profile.load_policy(), rewards or [accuracy_reward, format_reward]
    trainer.train(policy, task, rewards, profile.config, output_dir=output_dir, **options)

    saved = None
    if os.environ.get("RANK", "0") == "0":
        saved = save_policy(policy, output_dir / "policy")
    if engine == "trl":
        trainer.leave()
    return saved
