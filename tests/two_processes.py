"""One of two processes of `test_trl_bridge`'s runs; torchrun starts it with WHAT and a folder.

rewards: what each reward gives in two processes, and in one where all completions are at hand
train: a run, slow enough to be killed
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_kit import trl_bridge
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import DiversityReward, accuracy_reward


class Letters:
    """An embedder that needs no weights: how often each letter stands in a text."""

    def encode(self, texts, **options):
        return np.array([[text.count(c) + 0.01 for c in "0123456789abcdefgh"] for text in texts])


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    trl_bridge.join()
    profile = PROFILES["smoke"]
    config = dataclasses.replace(
        profile.config, generation_batch_size=24, num_generations=8, eval_prompts=0, max_steps=2
    )

    diversity = DiversityReward(8, Letters(), weight_start=0.5, weight_end=0.1)

    if what == "rewards":
        seen = []

        def recorded(reward):
            name = getattr(reward, "__name__", type(reward).__name__)

            def reward_and_record(prompts, completions, completion_ids, **columns):
                values = reward(
                    prompts=prompts,
                    completions=completions,
                    completion_ids=completion_ids,
                    **columns,
                )
                own = {"prompts": prompts, "completions": completions, "answer": columns["answer"]}
                state = columns["trainer_state"]
                own |= {"steps": [state.global_step, state.max_steps]}
                seen.append({"name": name, "values": values, **own})
                return values

            reward_and_record.__name__ = name
            return reward_and_record

        trainer = trl_bridge.grpo_trainer(
            profile.load_policy(), profile.load_task(), [accuracy_reward, diversity], config,
            output_dir=str(folder), seed=0,
        )  # fmt: skip
        trainer.reward_funcs = [recorded(reward) for reward in trainer.reward_funcs]
        trainer.train()
        rows = gather_object([{"rank": PartialState().process_index, "seen": seen}])
        if PartialState().is_main_process:
            (folder / "seen.json").write_text(json.dumps(rows))
    else:

        def slow(completions, **columns):
            time.sleep(0.5)
            return [0.0] * len(completions)

        (folder / f"pid-{PartialState().process_index}").write_text(str(os.getpid()))
        try:
            trl_bridge.train(
                profile.load_policy(), profile.load_task(), [accuracy_reward, slow],
                dataclasses.replace(config, max_steps=int(sys.argv[3]), save_steps=1),
                output_dir=folder / "run", seed=0, resume="resume" in sys.argv,
            )  # fmt: skip
        except RuntimeError as error:
            (folder / f"said-{PartialState().process_index}").write_text(str(error))
            raise SystemExit(2) from None


if __name__ == "__main__":
    main()
