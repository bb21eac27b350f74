"""Episodes under TRL: its trainer learns from the same ids, and a run of them can be resumed."""

import asyncio
import dataclasses
from functools import partial

import pytest
import torch
import trl
from toy import weights_of, without_times

from grpo_kit import trl_bridge
from grpo_kit.flow import Episode, Turn
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.training import PromptBatches
from grpo_kit.trl_rollouts import Episodes, of_output, one_sequence

PROFILE = PROFILES["smoke"]
CONFIG = dataclasses.replace(
    PROFILE.config, generation_batch_size=16, max_steps=2, eval_prompts=0, save_steps=1
)


def test_an_episode_is_one_sequence_with_a_mask_of_what_was_sampled():
    """PITFALLS 16 and 17."""
    first = Turn([1, 2], [3, 9], [-0.1, -0.2])
    second = Turn([1, 2, 3, 9, 4, 5], [6, 9], [-0.3, -0.4])
    assert one_sequence(Episode("q", 1.0, [first, second])) == {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 9, 4, 5, 6, 9],
        "logprobs": [-0.1, -0.2, 0.0, 0.0, -0.3, -0.4],
        "env_mask": [1, 1, 0, 0, 1, 1],
    }


def test_a_context_that_is_written_anew_is_refused(base):
    prompts = PromptBatches(base, tool_questions(), [accuracy_reward], CONFIG, 0)
    with pytest.raises(ValueError, match="context is 'memory': TRL needs .*'append'"):
        Episodes(prompts, PROFILE.load_agents(base))


def test_episodes_train_under_trl(tmp_path):
    """What TRL puts in its batch is what was played: ids, mask, and the outcome as the reward."""
    base, task = PROFILE.load_policy(), tool_questions()
    config = dataclasses.replace(CONFIG, max_completion_length=40)
    system = PROFILE.load_agents(base, context="append", max_turns=3)
    episodes = Episodes(PromptBatches(base, task, [accuracy_reward], config, 0), system)
    played, rewarded, (graded,) = [], [], episodes.rewards

    def watched(prompts, trainer):
        played.append((prompts, episodes(prompts, trainer)))
        return played[-1][1]

    async def outcome(**arguments):
        rewarded.append((arguments["output"], arguments["answer"], await graded(**arguments)))
        return rewarded[-1][2]

    args = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_steps=2,
        per_device_train_batch_size=32, num_generations=4, max_completion_length=512,
        learning_rate=1e-4, save_strategy="no", logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    before = weights_of(base)
    trainer = trl.GRPOTrainer(
        base.model, [outcome], args=args, train_dataset=episodes.dataset,
        processing_class=base.tokenizer, rollout_func=watched,
    )  # fmt: skip
    batches, inner = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda x: batches.append(inner(x)) or batches[-1]
    trainer.train()
    assert len(played) == len(batches) == len(rewarded) == 2
    steps = zip(played, batches, rewarded, strict=True)
    for (prompts, sent), batch, (outputs, answers, values) in steps:
        assert outputs == sent["output"]
        assert answers == [task.train[prompt[-1]["row"]]["answer"] for prompt in prompts]
        assert values == accuracy_reward([], outputs, [], answer=answers)
        assert any(0 in mask for mask in sent["env_mask"])  # tools spoke in between
        rows = zip(batch["completion_ids"], batch["tool_mask"], strict=True)
        for i, (ids, mask) in enumerate(rows):
            own, sampled = sent["completion_ids"][i], sent["env_mask"][i]
            assert ids[: len(own)].tolist() == own
            assert mask[: len(own)].tolist() == sampled
    assert not torch.equal(before, weights_of(trainer))


def test_a_reward_of_the_output_keeps_its_name():
    async def graded(completions, **columns):
        return [float("7" in text) for text in completions]

    given = {"prompts": [], "completions": ["plans"] * 2, "completion_ids": [], "answer": ["7"] * 2}
    outputs = ["<answer>7</answer>", "<answer>8</answer>"]
    for reward, name in ((accuracy_reward, "accuracy_reward"), (graded, "graded")):
        outcome = of_output(reward)
        assert outcome.__name__ == name
        assert asyncio.run(outcome(**given, output=outputs)) == [1.0, 0.0]


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
