"""Append-only episodes under TRL's GRPOTrainer: the same ids, masks and outcome."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
import trl
from toy import weights_of

from grpo_kit.flow import Episode, Turn
from grpo_kit.flow.export import of_output, one_sequence, trl_dataset, trl_rollout
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward


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


def test_a_context_that_is_written_anew_is_no_single_sequence(base, task):
    rewritten = Episode("q", 1.0, [Turn([1, 2], [3], [0.0]), Turn([1, 4], [5], [0.0])])
    with pytest.raises(ValueError, match="turn 2 does not continue turn 1.*'append'"):
        one_sequence(rewritten)
    with pytest.raises(ValueError, match="context is 'memory': TRL needs .*'append'"):
        trl_rollout(PROFILES["tiny"].load_agents(base), task.train)


def test_episodes_train_under_trl(tmp_path, task):
    """What TRL puts in its batch is what was played: ids, mask, and the outcome as the reward."""
    base = PROFILES["tiny"].load_policy()
    system = PROFILES["tiny"].load_agents(base, context="append", max_turns=3)
    rollout, played, rewarded = trl_rollout(system, task.train, max_new_tokens=40), [], []

    def watched(prompts, trainer):
        played.append((prompts, rollout(prompts, trainer)))
        return played[-1][1]

    graded = of_output(accuracy_reward)

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
        base.model, [outcome], args=args, train_dataset=trl_dataset(task.train),
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


def test_prompts_of_another_dataset_are_refused(base, task):
    """An evaluation set's row numbers are not those of the training rows."""
    rollout = trl_rollout(PROFILES["tiny"].load_agents(base, context="append"), task.train)
    plain = SimpleNamespace(unwrap_model=lambda model: model)
    given = {"accelerator": plain, "model": base.model, "processing_class": base.tokenizer}
    for prompts in (trl_dataset(task.test)["prompt"], task.train["prompt"]):
        with pytest.raises(ValueError, match="is none of the dataset's rows"):
            rollout(list(prompts), SimpleNamespace(**given))
