"""The tiny world's texts keep their promises, and the warm-up of its base is reproducible."""

import ast
import hashlib
import json
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from grpo_kit.flow.roles import read_action
from grpo_kit.paths import data_dir
from grpo_kit.rewards import accuracy_reward, extract_answer, format_reward
from grpo_kit.tasks import split_of
from grpo_kit.tasks import word_problems as W
from grpo_kit.tasks.tool_questions import TOOLS, make_tool_question
from grpo_kit.tasks.word_problems import make_problem, word_problems
from grpo_kit.tiny import pretrain as warm_up
from grpo_kit.tiny import problems, skills, world

rngs = st.integers(0, 2**32).map(random.Random)


@given(rng=rngs, style=st.sampled_from(list(problems.STYLE_SHARES)))
def test_a_solution_is_recognised_by_its_style_and_right_ones_score(rng, style):
    problem = make_problem(rng, rng.choice((2, 3)))
    completion = problems.solve(problem, style, rng)
    assert problems.solution_style(completion) == style
    columns = {"prompts": [""], "completions": [completion], "completion_ids": [[]]}
    (score,) = accuracy_reward(**columns, answer=[str(problem.answer)])
    assert (score == 1.0) == skills.is_right(problem.answer, completion)
    if style in problems.RIGHT_STYLES:
        assert score == 1.0
    if style == "unformatted":
        assert score == 0.0 and f"The answer is {problem.answer}." in completion
    assert (format_reward(**columns)[0] > 0) == (style != "unformatted")


def test_shipped_rows_are_of_their_split_and_in_no_other():
    task = word_problems()
    for split, rows, n in (("train", task.train, 4000), ("test", task.test, 500)):
        assert len(set(rows["numbers"])) == len(rows) == n
        assert {split_of(numbers) for numbers in rows["numbers"]} == {split}
        for prompt, answer, numbers in zip(
            rows["prompt"], rows["answer"], rows["numbers"], strict=True
        ):
            start, *steps = re.findall(r"[-+*]?\d+", numbers)
            assert f" has {start} " in prompt[0]["content"]
            value = int(start)
            for step in steps:
                value = W.apply(value, step[0], int(step[1:]))
            assert answer == str(value)
    assert not set(task.train["numbers"]) & set(task.test["numbers"])


@given(rng=rngs)
def test_a_verdict_after_careful_analysis_is_the_truth(rng):
    problem = make_problem(rng, 2)
    question, reply = (message["content"] for message in skills.sample_verify(problem, rng))
    proposed = int(question.split("Proposed answer: ")[1].split("\n")[0])
    verdict, style = extract_answer(reply), skills.verify_style(reply)
    assert verdict in ("Yes", "No") and style in skills.CHECKS
    if style == "recompute":
        assert (verdict == "Yes") == (proposed == problem.answer)
    if style != "rash":
        assert f"only {proposed} agrees" in reply
        last = reply.split(". ")[-1].split()
        assert (last[1].startswith("agrees.")) == (int(last[0]) == proposed) == (verdict == "Yes")


@given(rng=rngs)
def test_a_plan_is_read_back_and_a_careful_one_is_a_step_from_numbers_that_it_recalls(rng):
    question = make_tool_question(rng, "train")
    for step in question.plan:
        action = read_action(skills.plan_text(step, "So."), TOOLS)
        assert action.step == skills.step_text(step) and not action.problem
    reply = skills.sample_plan(question, rng)[1]["content"]
    style, action = skills.plan_style(reply), read_action(reply)
    assert style in skills.PLANS
    if style == "careful":
        assert action.step in map(skills.step_text, question.plan)
        recalled = {"none", *re.findall(r"\d+", action.justification)}
        assert set(action.context.split(", ")) <= recalled


@pytest.mark.parametrize(
    ("phase", "digest"),
    [
        ("drill", "d5547575f89bbb5a"),
        ("reliable", "622f1c054332eaca"),
        ("practice", "b9d12b8afafbdca3"),
        ("mixture", "a04a9854e6ca7b8b"),
        ("brevity", "ffb0ef6d5aa61512"),
    ],
)
def test_the_texts_are_those_that_the_shipped_bases_learnt_from(phase, digest):
    """Another text is another base, and with it every reported result."""
    rng = random.Random(phase)
    texts = [skills.sample_conversation(rng, phase) for _ in range(500)]
    assert hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16] == digest


def test_a_saved_tokenizer_is_loaded_as_it_was_and_keeps_every_text(tokenizer, saved_policy):
    """AutoTokenizer takes Qwen2's class for a Qwen2 model, whatever class was saved."""
    loaded = AutoTokenizer.from_pretrained(saved_policy)
    assert len(loaded) == len(tokenizer) and tokenizer.pad_token_id != tokenizer.eos_token_id
    rng = random.Random(0)
    texts = [m["content"] for _ in range(200) for m in skills.sample_conversation(rng)]
    for text in ["<think>12 + 7 = 19.</think><answer>19</answer>", *texts]:
        ids = tokenizer(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids, skip_special_tokens=True) == text


def test_training_rows_are_what_the_chat_template_writes(tokenizer):
    rng = random.Random(0)
    conversations = [skills.sample_conversation(rng) for _ in range(30)]
    for messages in conversations:
        ids, labels = warm_up.encode(tokenizer, messages)
        assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        counted = tokenizer.decode([label for label in labels if label != -100])
        assert counted == "".join(f"{reply}<|end|>" for reply in replies)


def test_the_untrained_base_attends_to_what_followed_the_same_token_before(tokenizer):
    model = warm_up.make_model(tokenizer)
    model.set_attn_implementation("eager")
    ids, mask, labels = warm_up.batch_pool(tokenizer, 0, 0, "copy")[0]
    first, second = ids.chunk(2, dim=1)
    assert mask.all() and torch.equal(first, second)
    assert torch.equal(labels, torch.cat([torch.full_like(first, -100), second], dim=1))
    n = first.shape[1]
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions[1][:, 0]
    followers = [attention[:, n + i, i + 1].mean().item() for i in range(2, n - 1)]
    assert sum(followers) / len(followers) > 0.6


def test_the_phases_follow_each_other_and_the_rate_falls_to_nothing_over_the_last():
    steps, rate = warm_up.STEPS, warm_up.LEARNING_RATE
    phases = [warm_up.phase_at(step, steps) for step in range(steps)]
    assert phases == [phase for phase, n in warm_up.PHASES.items() for _ in range(n)]
    rates = [warm_up.rate_at(step, steps) for step in range(steps)]
    falling = rates[-warm_up.PHASES["mixture"] :]
    assert 0 < rates[0] < 0.05 * rate and falling[0] == max(rates) == rate
    assert sorted(falling, reverse=True) == falling and 0 < falling[-1] < 0.01 * rate


def test_a_warm_up_depends_on_its_seed_alone(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(warm_up, "make_tokenizer", lambda seed: tokenizer)
    monkeypatch.setattr(warm_up, "BATCH", 2)
    monkeypatch.setattr(warm_up, "AVERAGE_EVERY", 2)
    made = []
    for folder, seed in (("one", 0), ("again", 0), ("other", 1)):
        warm_up.pretrain(tmp_path / folder, seed=seed, steps=5)
        made.append((tmp_path / folder / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2] and len(made[0]) <= 8_000_000


def test_a_base_that_is_warmed_up_further_is_another_model(policy):
    before = [p.clone() for p in policy.model.parameters()]
    one, again, other = (warm_up.warm_up_more(policy, seed, steps=2).model for seed in (1, 1, 2))
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (one, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert all(map(torch.equal, before, policy.model.parameters())), "the base stays as it is"
    assert not any(p.requires_grad for p in one.parameters()) and not one.training


# --- another setting of the world


@given(rng=rngs, difficulty=st.sampled_from((2, 3)))
def test_a_shortcut_is_right_on_two_steps_and_on_longer_problems_drops_the_rest(rng, difficulty):
    problem = make_problem(rng, difficulty)
    completion = problems.solve(problem, "shortcut", rng)
    assert problems.solution_style(completion) == "shortcut"
    assert skills.is_right(problem.values[2], completion)


def test_shares_decide_which_ways_are_shown_and_the_shipped_ones_are_the_default():
    chosen = skills.Shares(solutions={"shortcut": 1.0}, checks={"rash": 1.0}, plans={"careful": 1})
    rng = random.Random(0)
    problem, question = make_problem(rng, 2), make_tool_question(rng, "train")
    assert problems.solution_style(skills.sample_solve(problem, rng, chosen)[1]["content"]) == (
        "shortcut"
    )
    assert skills.verify_style(skills.sample_verify(problem, rng, chosen)[1]["content"]) == "rash"
    assert skills.plan_style(skills.sample_plan(question, rng, chosen)[1]["content"]) == "careful"
    one, other = (random.Random(1) for _ in range(2))
    assert skills.sample_conversation(one) == skills.sample_conversation(
        other, "mixture", skills.Shares()
    )


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ({"checks": {"guess": 1.0}}, "checks has 'guess': choose among recompute, rash, sloppy"),
        ({"solutions": {"words": 0.0}}, "give shares from 0, one above 0"),
        ({"plans": {"rash": 2.0, "careful": -1.0}}, "give shares from 0"),
        ({"fooled": 1.5}, "fooled is 1.5"),
    ],
)
def test_shares_that_cannot_be_shown_are_refused(shares, problem):
    with pytest.raises(ValueError, match=problem):
        skills.Shares(**shares)


def test_a_world_is_made_once_for_each_recipe(tmp_path, monkeypatch, policy):
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path))
    made = []

    def more(base, seed, steps, shares):
        made.append((seed, steps, shares.checks))
        return warm_up.warm_up_more(base, seed, 1, shares=shares)

    monkeypatch.setattr(world, "warm_up_more", more)
    checks = {"recompute": 0.5, "rash": 0.5}
    folders = [world.make_world(checks=checks, steps=s).name for s in (3, 3, 4)]
    assert made == [(1, 3, checks), (1, 4, checks)]
    assert folders[0] == folders[1] != folders[2]
    assert json.loads((tmp_path / folders[0] / "recipe.json").read_text())["steps"] == 3
    assert (tmp_path / folders[0] / "model.safetensors").exists()


def test_the_base_of_notebook_02_is_shipped_as_its_recipe_says():
    notebook = (Path(__file__).parents[2] / "notebooks" / "02_diversity_reward.ipynb").read_text()
    source = "".join(line for cell in json.loads(notebook)["cells"] for line in cell["source"])
    solutions = ast.literal_eval(re.search(r"solutions=(\{.*?\})", source)[1])
    folder = world.make_world(solutions=solutions)
    assert folder.parent == data_dir()
    assert json.loads((folder / "recipe.json").read_text()) == world.recipe(solutions=solutions)
