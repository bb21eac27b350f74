"""Training on the planner's turns: who learns, from what, and what is logged and kept."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from toy import all_right, configure, even_ids, plain_logps, weights_of, without_times

from grpo_kit import objective
from grpo_kit.flow import (
    Episode,
    FlowGRPO,
    Memory,
    OfflineTraces,
    Turn,
    episode_metrics,
    evaluate_episodes,
    score_episodes,
)  # fmt: skip
from grpo_kit.flow.episodes import Action, Step
from grpo_kit.generation import completion_logps
from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.training import Learner, PromptBatches, train

CONFIG = configure(max_steps=2, max_completion_length=40, loss_type="grpo", eval_prompts=0)


@pytest.fixture
def base():
    return PROFILES["tiny"].load_policy()


@pytest.fixture
def system(base):
    return PROFILES["tiny"].load_agents(base, max_turns=4)


def run(
    base, task, system, folder, source=FlowGRPO, reward=accuracy_reward, resume=False, changes=(),
    hooks=(), **options,
):  # fmt: skip
    return train(
        base, task, [reward], dataclasses.replace(CONFIG, **dict(changes)), output_dir=folder,
        seed=0, resume=resume, batch_source=lambda prompts: source(prompts, system, **options),
        **dict(hooks),
    )  # fmt: skip


def test_the_planner_learns_and_no_gradient_reaches_a_frozen_module(base, task, system, tmp_path):
    frozen = system.executor.policy
    before, before_frozen = weights_of(base), weights_of(frozen)
    changes = {"beta": 0.05, "generation_batch_size": 16}
    result = run(base, task, system, tmp_path, changes=changes)
    assert not torch.equal(before, weights_of(base))
    assert torch.equal(before_frozen, weights_of(frozen))
    assert all(p.grad is None and not p.requires_grad for p in frozen.model.parameters())
    row = result.history[-1]
    assert row["kl"] > 0 and row["grad_norm"] > 0  # the policy has left its reference
    assert 1 <= row["episode/turns"] <= 4 and 0 <= row["reward"] <= 1
    assert {"episode/tool_errors", "entropy", "num_generated_tokens", "reward_std"} <= set(row)


def test_only_what_the_planner_sampled_is_in_a_batch(base, task, system):
    """Every trained token is a sampled one, every prompt is the request of its turn.

    PITFALLS 5, 16, 17 and 21: through every turn, tool text in between.
    """
    config = dataclasses.replace(CONFIG, generation_batch_size=16)
    prompts = PromptBatches(base, task, [accuracy_reward], config, seed=0)
    flow, metrics, seen = FlowGRPO(prompts, system), {}, []
    plan = flow.system.planner.plan

    def watched(prompt_ids, *arguments, **options):
        rollouts, actions = plan(prompt_ids, *arguments, **options)
        seen.extend(zip(map(list, prompt_ids), rollouts.completion_lists(), strict=True))
        return rollouts, actions

    flow.system.planner.plan = watched
    played = flow.episodes(torch.Generator().manual_seed(0))
    flow.episodes = lambda *_: played
    (batch,), episodes = flow(None, None, metrics), played[0]
    assert batch.advantages.any()
    turns = [(i, turn) for i, episode in enumerate(episodes) for turn in episode.turns]
    assert sorted((turn.prompt_ids, turn.completion_ids) for _, turn in turns) == sorted(seen)
    logps, _ = completion_logps(base.model, batch.rollouts, pad_token_id=base.pad_token_id)
    assert torch.allclose(logps, batch.rollouts.logps, atol=2e-4)
    assert batch.rollouts.completion_lists() == [turn.completion_ids for _, turn in turns]
    assert batch.generated_tokens == sum(len(turn.completion_ids) for _, turn in turns)
    for row, (i, turn) in enumerate(turns):
        assert batch.rollouts.prompt_ids[batch.rollouts.prompt_index[row]] == turn.prompt_ids
        assert batch.rewards[row] == episodes[i].reward
        assert batch.advantages[row] == batch.advantages[batch.episode_index == i][0]
    assert len(batch.rewards) > len(episodes)
    assert metrics["reward"] == pytest.approx(sum(e.reward for e in episodes) / len(episodes))
    assert metrics["completions/mean_length"] == pytest.approx(batch.generated_tokens / len(turns))


LENGTHS, REWARDS = [[3, 5], [2], [4, 2, 6], [3]], [1.0, 0.0, 0.0, 1.0]
ADVANTAGES = torch.tensor([0.5, -1.0, 0.7, -0.3])


def episodes_of():
    generator = torch.Generator().manual_seed(1)
    episodes = []
    for i, (turns, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        ids = [torch.randint(5, 60, (n,), generator=generator).tolist() for n in turns]
        turns = [Turn([7, 8, 9 + i], row, [-1.0] * len(row)) for row in ids]
        episodes.append(Episode(i // 2, reward, turns))
    return episodes


def batch_of(policy, episodes, credit="all"):
    source = SimpleNamespace(prompts=SimpleNamespace(policy=policy), credit=credit)
    return FlowGRPO.batch(source, episodes, ["reward"], torch.ones(4, 1), ADVANTAGES)


def by_hand(policy, episodes, advantages, steps, level="token", cap=None, beta=0.0, loss="grpo"):
    """Steps of plain SGD on whole episodes, weighed as in eq. 10: PITFALLS 11."""
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)

    def logps_of(turn):
        return plain_logps(policy.model, turn.prompt_ids, turn.completion_ids)

    with torch.no_grad():
        old = [[logps_of(turn) for turn in episode.turns] for episode in episodes]
    tokens = sum(len(turn.completion_ids) for e in episodes for turn in e.turns)
    for members in steps:
        loss_of_step = 0.0
        for i in members:
            for turn, before in zip(episodes[i].turns, old[i], strict=True):
                own = logps_of(turn)
                log_ratio = own - before
                if level == "sequence":
                    log_ratio = log_ratio.mean().expand_as(log_ratio)
                ratio = log_ratio.exp()
                term = torch.min(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
                if cap:
                    term = term * (before - torch.tensor(turn.logprobs)).exp().clamp(max=cap)
                difference = before - own  # the reference is the policy as it was
                term = term - beta * (difference.exp() - difference - 1) * ratio
                share = 1 / len(episodes[i].turns) / len(own) if loss == "grpo" else 4 / tokens
                loss_of_step = loss_of_step - share / len(members) * term.sum()
        optimizer.zero_grad()
        loss_of_step.backward()
        optimizer.step()
    return weights_of(policy)


@pytest.mark.parametrize("choice", [{"baseline": "others"}, {"scale_rewards": "batch"}])
def test_a_comparison_with_the_whole_batch_gets_all_episodes(base, task, system, choice):
    config = dataclasses.replace(CONFIG, num_generations=2, generation_batch_size=4, **choice)
    flow = FlowGRPO(PromptBatches(base, task, [accuracy_reward], config, seed=0), system)
    expected = objective.group_advantages(torch.tensor(REWARDS), 2, **choice)
    assert torch.equal(flow.advantages(episodes_of()), expected)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "variant", [{}, {"level": "sequence"}, {"cap": 2.0}, {"beta": 0.1}, {"loss": "dapo"}]
)
def test_updates_weigh_whole_episodes_as_eq_10(new_policy, variant, passes, micro):
    """One step on all episodes, or two passes of two steps, which share one old policy."""
    episodes, size = episodes_of(), 4 // passes
    steps = [range(4)] if passes == 1 else [(0, 1), (2, 3)] * 2
    expected = by_hand(new_policy(), episodes, ADVANTAGES, steps, **variant)
    config = dataclasses.replace(
        CONFIG, generation_batch_size=4, num_generations=2, num_iterations=passes,
        max_grad_norm=0.0, per_device_train_batch_size=micro,
        gradient_accumulation_steps=size // micro,
        loss_type=variant.get("loss", "grpo"), beta=variant.get("beta", 0.0),
        importance_sampling_level=variant.get("level", "token"),
        importance_sampling_cap=variant.get("cap"),
    )  # fmt: skip
    policy = new_policy()
    start = weights_of(policy)
    learner = Learner(policy, config)
    learner.optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
    learner.update(batch_of(policy, episodes), scheduled=False)
    assert (weights_of(policy) - expected).norm() < 1e-3 * (expected - start).norm()


def test_with_credit_for_the_final_turn_the_others_get_nothing(policy):
    got = batch_of(policy, episodes_of(), "final").advantages
    assert torch.equal(got, torch.tensor([0, 0.5, -1, 0, 0, 0.7, -0.3]))


def test_offline_traces_are_successes_of_the_first_policy(base, task, system, tmp_path):
    """They are kept for all steps."""
    batches = []

    class Watched(OfflineTraces):
        def __call__(self, *arguments):
            batches.extend(super().__call__(*arguments))
            yield batches[-1]

    first, second = run(base, task, system, tmp_path, Watched).history[-2:]
    assert first["offline/traces"] > 0 and "offline/traces" not in second
    assert second["num_generated_tokens"] == first["num_generated_tokens"]
    assert all((batch.advantages == 1).all() and (batch.rewards == 1).all() for batch in batches)


@pytest.mark.parametrize("source", [FlowGRPO, pytest.param(OfflineTraces, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_the_same_numbers(base, task, tmp_path, source):
    """PITFALLS 23; nothing that frozen roles remember is needed."""
    again = PROFILES["tiny"].load_policy
    # traces need a reward of 1, and more turns to earn it
    reward, turns = (even_ids, 2) if source is FlowGRPO else (accuracy_reward, 4)

    def fresh():
        return PROFILES["tiny"].load_agents(again(), max_turns=turns)

    whole = run(base, task, fresh(), tmp_path / "whole", source, reward).history
    assert whole[-1]["grad_norm"] > 0

    class Killed(source):
        def __call__(self, generator, state, metrics):
            if state.global_step == 1:
                raise KeyboardInterrupt
            yield from super().__call__(generator, state, metrics)

    with pytest.raises(KeyboardInterrupt):
        run(again(), task, fresh(), tmp_path / "killed", Killed, reward)
    resumed = run(again(), task, fresh(), tmp_path / "killed", source, reward, resume=True).history
    assert without_times(resumed) == without_times(whole)
    other = dataclasses.replace(fresh(), max_turns=3)
    with pytest.raises(ValueError, match=f"another configuration.*{turns} turns.*3 turns"):
        run(again(), task, other, tmp_path / "killed", source, reward, resume=True)


def test_an_episode_is_scored_by_its_output_and_by_the_ids_of_all_its_turns():
    row = {"prompt": [{"role": "user", "content": "?"}], "answer": "7"}
    turns = [Turn([1], [3] * n, [-0.1] * n) for n in (2, 1)]
    outputs = ["<answer>7</answer>", "<answer>8</answer>", ""]
    episodes = [Episode(0, None, turns, row, output=output) for output in outputs]
    assert score_episodes(episodes, [accuracy_reward]).tolist() == [[1.0], [0.0], [0.0]]
    assert [e.reward for e in episodes] == [1.0, 0.0, 0.0]
    score_episodes(episodes, [lambda completion_ids, **_: [None, *map(len, completion_ids[1:])]])
    assert [e.reward for e in episodes] == [None, 3.0, 3.0], "None is never 0"


def test_errors_repeats_and_stops_are_counted():
    def memory(*calls):  # "!" marks an error, "?" a search that found nothing
        return Memory(tuple(
            Step(Action(), call, "not found" if "?" in call else "1", "!" in call)
            for call in calls
        ))  # fmt: skip

    turn = Turn([1], [2], [0.0])
    one = Episode(0, 1.0, [turn] * 5, memory=memory("a", "a", "b!", "b!", "c?"), stopped="verifier")
    two = Episode(0, 0.0, [turn], memory=memory("a"), stopped="turn limit")
    assert episode_metrics([one, two]) == {
        "turns": 3.0, "tool_errors": 3 / 6, "repeated_calls": 1 / 6, "stopped": 0.5
    }  # fmt: skip


def test_success_is_measured_on_held_out_questions(base, task, system):
    held_out = {"system": system, "dataset": task.test, "config": CONFIG, "questions": 4}
    one, two = (evaluate_episodes(base, **held_out) for _ in range(2))
    assert one == two and one["eval/n"] == 4
    assert evaluate_episodes(base, **held_out, correct=all_right)["eval/greedy"] == 1.0
    assert 0 <= one["eval/pass@1"] <= 1 and 1 <= one["eval/turns"] <= 4


OWN = {"advantages": objective.group_advantages}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"per": "row"}, "per is 'row'"),
        ({}, {"credit": "first"}, "credit is 'first'"),
        ({"dynamic_sampling_rounds": 1}, {}, "dynamic_sampling_rounds is 1.*need 0"),
        ({"scale_rewards": "batch"}, {"per": "turn"}, "is 'batch'.*choose 'trajectory'"),
        ({"eval_prompts": 8}, {}, "eval_prompts is 8.*evaluate_episodes"),
        ({"num_iterations": 2}, {"source": OfflineTraces}, r"updates a step.* are \(2, 0.0, None"),
        ({"beta": 0.1}, {"source": OfflineTraces}, r"beta.* are \(1, 0.1, None"),
        ({}, {"source": OfflineTraces, "hooks": OWN}, "1 and would ignore the advantages hook"),
    ],
)
def test_what_episodes_do_not_have_is_refused(base, task, tmp_path, changes, options, message):
    with pytest.raises(ValueError, match=message):
        run(base, task, None, tmp_path, changes=changes, **options)


def test_a_reward_that_is_never_earned_leaves_no_trace(base, task, system, tmp_path):
    def never(completions, **columns):
        return [0.0] * len(completions)

    with pytest.raises(RuntimeError, match="none of 16 episodes earned a reward of 1"):
        run(base, task, system, tmp_path, OfflineTraces, never)


@pytest.mark.gpu
def test_episodes_are_played_and_learnt_from_on_cuda(task, tmp_path):
    policy = load_policy(data_dir() / "tiny-base", device="cuda")
    system = PROFILES["tiny"].load_agents(policy, max_turns=3)
    changes = {"beta": 0.05, "num_iterations": 2}
    row = run(policy, task, system, tmp_path, changes=changes).history[-1]
    assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
