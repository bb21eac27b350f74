"""The tiny world's texts say what they claim; the warm-up can be stopped and resumed."""

import json
import multiprocessing
import random
import re
from collections import Counter
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.stats import binomtest
from toy import killed_in
from transformers import AutoTokenizer

from grpo_kit.flow.roles import read_action
from grpo_kit.rewards import accuracy_reward, extract_answer, format_reward
from grpo_kit.tasks import word_problems as W
from grpo_kit.tasks.tool_questions import THREE_TOOLS, TOOLS, make_tool_question
from grpo_kit.tasks.word_problems import Problem, make_problem, make_rows, word_problems
from grpo_kit.tiny import pretrain as warm_up
from grpo_kit.tiny import problems, skills

rngs = st.integers(0, 2**32).map(random.Random)


@given(rng=rngs, difficulty=st.integers(1, 5))
def test_every_value_of_a_chain_is_within_bounds_and_its_numbers_decide_the_split(rng, difficulty):
    problem = make_problem(rng, difficulty)
    assert len(problem.steps) == difficulty
    assert all(W.LOWEST <= value <= W.HIGHEST for value in problem.values)
    expression = str(problem.start)
    for operator, amount in problem.steps:
        expression = f"({expression}){operator}{amount}"
    assert problem.answer == eval(expression)  # the test's own arithmetic, of its own digits
    renamed = Problem(problem.start, problem.steps, "Zoe", "pens", ("wins", "drops"))
    assert renamed.numbers == problem.numbers, "by the numbers alone"


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


def test_each_step_opens_with_its_word_in_question_and_solutions():
    problem = Problem(12, (("+", 7), ("-", 4), ("*", 2)), verbs=("finds", "loses", "doubles"))
    assert problem.question == (
        "Mia has 12 coins. Mia first finds 7. Mia then loses 4. Mia next doubles them. "
        "How many coins does Mia have?"
    )
    steps = "first 12 + 7 = 19, then 19 - 4 = 15, next 15 * 2 = 30."
    story = "first finds 7, 12 + 7 = 19. then loses 4, 19 - 4 = 15. next doubles them, 15 * 2 = 30."
    reasoning = {"equations": steps, "words": f"Start with 12. {story}", "list": f"Steps: {steps}"}
    for style, text in reasoning.items():
        completion = problems.solve(problem, style, random.Random(0))
        assert completion == f"<think>{text}</think><answer>30</answer>"
    assert W.order(7) == ["first", "then", "next", "later", *["finally"] * 3]


def test_wrong_styles_are_mostly_wrong_and_the_likeliest_style_is_a_wrong_one():
    rng = random.Random(0)
    for style, most in (("guess", 0.15), ("sloppy", 0.5)):
        drawn = [make_problem(rng, rng.choice((2, 3))) for _ in range(400)]
        right = sum(skills.is_right(p.answer, problems.solve(p, style, rng)) for p in drawn) / 400
        assert 0 < right < most
    shares = problems.STYLE_SHARES
    assert max(shares, key=shares.get) not in problems.RIGHT_STYLES
    assert sum(shares.values()) == pytest.approx(1.0)


def test_shipped_rows_are_what_the_generator_makes_and_the_splits_are_disjoint():
    task = word_problems()
    for split, rows, n in (("train", task.train, 4000), ("test", task.test, 500)):
        generated = make_rows(split, n)
        for column in ("answer", "difficulty", "numbers"):
            assert rows[column] == [row[column] for row in generated]
        assert [p[0]["content"] for p in rows["prompt"]] == [row["question"] for row in generated]
        assert len(set(rows["numbers"])) == n
    assert not set(task.train["numbers"]) & set(task.test["numbers"])


def test_the_grader_says_yes_as_often_as_its_rates_tell():
    rng, labels_of = random.Random(0), {}
    for _ in range(12_000):
        problem = make_problem(rng, 2)
        messages = skills.sample_solve(problem, rng)
        if messages[2:] and messages[2]["content"] == skills.META_QUESTION:
            solution, label = messages[1]["content"], messages[3]["content"]
            style = problems.solution_style(solution)
            right = skills.is_right(problem.answer, solution) or style == "unformatted"
            labels_of.setdefault((style, right), []).append(label == "Yes")
    for (style, right), labels in labels_of.items():
        rate = problems.STYLES[style].yes_rates[not right]
        assert binomtest(sum(labels), len(labels), rate).pvalue > 1e-5, (style, right)
    assert {style for style, _ in labels_of} == set(problems.STYLE_SHARES)


@given(rng=rngs)
def test_a_verdict_after_careful_analysis_is_the_truth(rng):
    problem = make_problem(rng, 2)
    question, reply = (message["content"] for message in skills.sample_verify(problem, rng))
    proposed = int(question.split("Proposed answer: ")[1].split("\n")[0])
    verdict, style = extract_answer(reply), skills.verify_style(reply)
    assert verdict in ("Yes", "No") and style in skills.VERIFY_SHARES
    if style == "recompute":
        assert (verdict == "Yes") == (proposed == problem.answer)
    if style != "rash":
        assert f"only {proposed} agrees" in reply
        last = reply.split(". ")[-1].split()
        assert (last[1].startswith("agrees.")) == (int(last[0]) == proposed) == (verdict == "Yes")


@given(rng=rngs)
def test_judgements_are_json_of_scores_from_one_to_five(rng):
    reply = skills.sample_judge(make_problem(rng, 2), rng)[1]["content"]
    scores = json.loads(reply)
    assert list(scores) == [*skills.CRITERIA, "rationale"]
    assert all(scores[name] in range(1, 6) for name in skills.CRITERIA)


@given(rng=rngs)
def test_a_plan_is_read_back_and_a_careful_one_is_a_step_from_numbers_that_it_recalls(rng):
    question = make_tool_question(rng, "train", tools=rng.choice((TOOLS, THREE_TOOLS)))
    for step in question.plan:
        action = read_action(skills.plan_text(step, "So."), question.tools)
        assert action.step == skills.step_text(step) and not action.problem
    reply = skills.sample_plan(question, rng)[1]["content"]
    style, action = skills.plan_style(reply), read_action(reply)
    assert style in skills.PLAN_SHARES
    if style == "careful":
        assert action.step in map(skills.step_text, question.plan)
        recalled = {"none", *re.findall(r"\d+", action.justification)}
        assert set(action.context.split(", ")) <= recalled


def test_progress_tells_the_plan_up_to_the_first_step_that_memory_lacks():
    question = make_tool_question(random.Random(0), "train", "discount")
    item, price = question.items[0], question.prices[0]
    shop = question.catalogue[question.items[0]].split()[-1]
    less = int(question.catalogue[shop].split()[-1])
    stages = [
        f"{item}?",
        f"{item} {price}, shop {shop}, {shop}?",
        f"{item} {price}, shop {shop}, {shop} discount {less}, {price}-{less}?",
        f"{item} {price}, shop {shop}, {shop} discount {less}, {price}-{less} = {price - less}",
    ]
    memory, useless = [], ("calculator", "1+1", "1+1 = 2")
    for step, text in zip([*question.plan, None], stages, strict=True):
        assert skills.progress_text(question, [useless, *memory]) == text
        if step:
            memory.append((*step, question.run(*step)))


@given(rng=rngs)
def test_the_frozen_roles_reply_from_memory(rng):
    question = make_tool_question(rng, "train", tools=rng.choice((TOOLS, THREE_TOOLS)))
    check = skills.sample_check(question, rng)[1]["content"]
    assert check.endswith((" STOP", " CONTINUE"))
    request, reply = (message["content"] for message in skills.sample_answer(question, rng))
    assert f"-> {question.items[0]} {question.prices[0]}" in request
    tool, argument = question.plan[-1]
    if f"{tool}({argument}) ->" in request and "?" not in reply:
        assert extract_answer(reply) == str(question.answer)


def test_the_third_tool_is_taught_where_it_is_needed_and_tried_elsewhere():
    rng, tools = random.Random(0), {True: Counter(), False: Counter()}
    for _ in range(400):
        request, reply = (m["content"] for m in skills.sample_conversation(rng, "tools"))
        assert request.startswith(("Question: ", "Context: "))
        if request.endswith("next step?"):
            assert "Tools: lookup, calculator, python\n" in request
            needed = "the cheaper of" in request or "the dearer of" in request
            if skills.plan_style(reply) == "careful":
                tools[needed][read_action(reply).tool] += 1
    assert tools[True].keys() == {"lookup", "python"}
    assert tools[False].keys() == {"lookup", "calculator"}


def test_short_is_what_has_few_words_and_is_asked_as_often_as_whether_it_is_right():
    rng, lengths, asked = random.Random(0), {"Yes": [], "No": []}, Counter()
    for _ in range(800):
        _, solution, *more = (m["content"] for m in skills.sample_conversation(rng, "brevity"))
        for question, label in zip(more[::2], more[1::2], strict=True):
            asked[question] += 1
            if question == skills.BREVITY_QUESTION:
                lengths[label].append(len(re.sub("<.*?>", " ", solution).split()))
    assert asked.keys() == {skills.BREVITY_QUESTION, skills.META_QUESTION}
    assert binomtest(asked[skills.META_QUESTION], asked.total(), 0.5).pvalue > 1e-3
    assert min(lengths["Yes"]) == skills.SHORT and 20 < max(lengths["No"]) < skills.LONG
    assert fmean(lengths["Yes"]) + 5 < fmean(lengths["No"])


@pytest.mark.parametrize(
    ("phase", "shown"),
    [("reliable", {skills.FIRST_STYLE}), ("practice", set(problems.RIGHT_STYLES))],
)
def test_careless_styles_are_left_to_the_last_phase(phase, shown):
    rng, styles = random.Random(0), set()
    for _ in range(400):
        messages = skills.sample_conversation(rng, phase)
        request, reply = (message["content"] for message in messages[:2])
        if request.endswith("have?") and len(request.split()) > 14:  # a drill has one step alone
            styles.add(problems.solution_style(reply))
        elif "Proposed answer" in request:
            assert skills.verify_style(reply) == "recompute"
        elif request.endswith("next step?"):
            assert skills.plan_style(reply) == "careful"
    assert styles == shown


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
    shorter = [warm_up.phase_at(step, 1000) for step in range(1000)]
    assert list(dict.fromkeys(shorter)) == list(warm_up.PHASES)
    assert sorted(shorter, key=list(warm_up.PHASES).index) == shorter


@pytest.fixture
def small(monkeypatch, tokenizer):
    """Batches of 2 rows, and a tokenizer that is there already."""
    monkeypatch.setattr(warm_up, "BATCH", 2)
    monkeypatch.setattr(warm_up, "make_tokenizer", lambda seed: tokenizer)
    return monkeypatch


def test_a_killed_warm_up_goes_on_where_it_stopped(tmp_path, small):
    small.setattr(warm_up, "STATE_EVERY", 2)
    options, clip = {"steps": 5, "processes": 1}, torch.nn.utils.clip_grad_norm_
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = warm_up.pretrain(whole, **options)
    assert result["steps"] == 5 and result["parameters"] < 4e6
    assert not (whole / "warm-up.pt").exists()
    with small.context() as killing:
        killing.setattr(torch.nn.utils, "clip_grad_norm_", killed_in(3, clip))
        with pytest.raises(KeyboardInterrupt):
            warm_up.pretrain(broken, **options)
    with pytest.raises(ValueError, match="'seed': 0, .* not of .*'seed': 1, .*delete"):
        warm_up.pretrain(broken, seed=1, **options)
    for processes in (99, -1):
        with pytest.raises(ValueError, match=f"processes is {processes}; choose 1 to 2,"):
            warm_up.pretrain(broken, processes=processes)
    warm_up.pretrain(broken, **options)
    weights = (whole / "model.safetensors").read_bytes()
    assert weights == (broken / "model.safetensors").read_bytes() and len(weights) <= 8_000_000


def test_a_process_whose_parent_was_killed_ends(tmp_path, monkeypatch):
    dead = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(warm_up.multiprocessing, "parent_process", lambda: dead)
    monkeypatch.setattr(warm_up, "make_tokenizer", lambda seed: range(9))
    monkeypatch.setattr(warm_up, "make_model", lambda *given: torch.nn.Linear(1, 1))
    with pytest.raises(SystemExit, match="was killed"):
        warm_up._warm_up(0, tmp_path, {"seed": 0, "steps": 2, "processes": 2}, {})


def test_weights_are_averaged_now_and_then_and_at_the_end(tmp_path, small):
    calls = []
    small.setattr(warm_up, "AVERAGE_EVERY", 2)
    small.setattr(warm_up, "average_parameters", lambda *given: calls.append(given))
    warm_up._warm_up(0, tmp_path / "state", {"seed": 0, "steps": 5, "processes": 2}, {})
    assert len(calls) == 3


@pytest.mark.slow
def test_two_processes_that_were_killed_go_on_each_with_its_own_moments(tmp_path, small):
    small.setattr(warm_up, "STATE_EVERY", 2)
    small.setattr(warm_up, "AVERAGE_EVERY", 2)
    recipe, forks = {"seed": 0, "steps": 5, "processes": 2}, multiprocessing.get_context("fork")

    def both(folder, state) -> None:
        results, meeting = forks.SimpleQueue(), f"file://{folder}/meeting-{len(state)}"
        given = results, meeting, folder / "warm-up.pt", recipe, state
        rank_of = warm_up._warm_up_with_others
        ranks = [forks.Process(target=rank_of, args=(rank, *given)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    both(whole, {})
    with small.context() as killing:
        clip = torch.nn.utils.clip_grad_norm_
        killing.setattr(torch.nn.utils, "clip_grad_norm_", killed_in(3, clip))
        both(broken, {})
    state = torch.load(broken / "warm-up.pt", weights_only=True)
    first, second = (one["state"][0]["exp_avg"] for one in state["optimizers"])
    assert not torch.equal(first, second)
    both(broken, state)
    ends = [(folder / "model.safetensors").read_bytes() for folder in (whole, broken)]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_two_processes_warm_up_one_base(tmp_path):
    result = warm_up.pretrain(tmp_path, seed=0, steps=2, processes=2)
    assert (result["steps"], result["processes"]) == (2, 2) and result["loss"] > 0
    assert not (tmp_path / "warm-up.pt").exists()
    weights = load_file(tmp_path / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


def test_a_base_that_is_warmed_up_further_is_another_model(policy):
    before = [p.clone() for p in policy.model.parameters()]
    one, again, other = (warm_up.warm_up_more(policy, seed, steps=2).model for seed in (1, 1, 2))
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (one, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert all(map(torch.equal, before, policy.model.parameters())), "the base stays as it is"
    assert not any(p.requires_grad for p in one.parameters()) and not one.training
