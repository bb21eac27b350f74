"""One of two processes of `test_trl_bridge`'s runs; torchrun starts it with WHAT and a folder.

rewards: writes what each reward gives in either process
train: a run, slow enough to be killed; with a third argument it is resumed
"""

import dataclasses
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from toy import Letters

from grpo_kit import trl_bridge
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import DiversityReward, accuracy_reward

LETTERS = Letters("0123456789abcdefgh", 0.01)


def record_rewards(folder: Path, *given, **options) -> None:
    """Train, and write what either process saw of each reward."""
    calls, trainer = [], trl_bridge.grpo_trainer(*given, output_dir=str(folder), **options)

    def recorded(reward, trainer_state, **columns):
        values = reward(**columns, trainer_state=trainer_state)
        state = {name: getattr(trainer_state, name) for name in ("global_step", "max_steps")}
        own = {name: columns[name] for name in ("prompts", "completions", "answer")}
        calls.append({"values": values, "state": state, **own})
        return values

    trainer.rewards = [partial(recorded, reward) for reward in trainer.rewards]
    trainer.train()
    ranks = gather_object([calls])
    if PartialState().is_main_process:
        (folder / "seen.json").write_text(json.dumps(ranks))


def slow(completions, **columns):
    time.sleep(0.5)
    return [0.0] * len(completions)


def main(what: str, folder: Path, resume: bool) -> None:
    trl_bridge.join()
    profile = PROFILES["smoke"]
    config = dataclasses.replace(
        profile.config, generation_batch_size=24, num_generations=8, eval_prompts=0, save_steps=1,
        max_steps=2 if what == "rewards" else 6,
    )  # fmt: skip
    policy, task = profile.load_policy(), profile.load_task()
    if what == "rewards":
        diversity = DiversityReward(8, LETTERS, weight_start=0.5, weight_end=0.1)
        return record_rewards(folder, policy, task, [accuracy_reward, diversity], config, seed=0)
    rank = PartialState().process_index
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    options = {"output_dir": folder / "run", "seed": 0, "resume": resume}
    try:
        trl_bridge.train(policy, task, [accuracy_reward, slow], config, **options)
    except RuntimeError as error:
        (folder / f"error-{rank}").write_text(str(error))
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), resume=len(sys.argv) > 3)
    trl_bridge.leave()
