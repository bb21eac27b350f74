"""One of two processes of a run of `test_trl_bridge`; torchrun starts it with a folder.

It writes there what each reward gives in either process.
"""

import dataclasses
import json
import sys
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


if __name__ == "__main__":
    trl_bridge.join()
    profile = PROFILES["smoke"]
    config = dataclasses.replace(
        profile.config, generation_batch_size=24, num_generations=8, eval_prompts=0, max_steps=2
    )
    diversity = DiversityReward(8, LETTERS, weight_start=0.5, weight_end=0.1)
    given = profile.load_policy(), profile.load_task(), [accuracy_reward, diversity], config
    record_rewards(Path(sys.argv[1]), *given, seed=0)
    trl_bridge.leave()
