"""Episodes under TRL: they are what its trainer learns from, and a run of them can be resumed."""

import dataclasses
from functools import partial

import pytest
from toy import without_times

from grpo_kit import trl_bridge
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.trl_rollouts import Episodes

PROFILE = PROFILES["smoke"]
CONFIG = dataclasses.replace(
    PROFILE.config, generation_batch_size=16, max_steps=2, eval_prompts=0, save_steps=1
)


def test_a_resumed_run_of_episodes_equals_the_unbroken_one(tmp_path):
    system = PROFILE.load_agents(PROFILE.load_policy(), context="append", max_turns=2)
    calls = []

    def breaking(prompts, completions, **columns):
        calls.append(len(prompts))
        if len(calls) == 4:  # the second step of the second run
            raise RuntimeError("a power cut")
        return [float(len(str(text)) % 3) for text in completions]

    def run(folder, **options):
        given = PROFILE.load_policy(), tool_questions(), [accuracy_reward, breaking], CONFIG
        options |= {"output_dir": tmp_path / folder, "seed": 0}
        return trl_bridge.train(*given, rollout=partial(Episodes, system=system), **options)

    whole = run("whole")
    assert "episodes, 2 turns" in whole.start["batch_source"]
    assert whole.history[-1]["grad_norm"] > 0
    with pytest.raises(RuntimeError, match="a power cut"):
        run("broken")
    resumed = run("broken", resume=True)
    assert len(calls) == 5, "one step was lost"
    assert without_times(resumed.history) == without_times(whole.history)
