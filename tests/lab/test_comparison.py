"""`compare`: a reader's own arms, trained from one start and judged seed by seed."""

import asyncio
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import Letters, even_ids

from grpo_kit.lab import comparison, grid
from grpo_kit.lab.comparison import Comparison, compare, seeds_to_decide
from grpo_kit.lab.ideas import load_arms
from grpo_kit.lab.identity import identity_of
from grpo_kit.lab.records import load
from grpo_kit.lab.statistics import judge
from grpo_kit.paths import results_dir, writing
from grpo_kit.rewards import (
    CertaintyReward,
    DiversityReward,
    EndpointJudge,
    LocalJudge,
    MetaEvaluationReward,
    QualityJudgeReward,
)
from grpo_kit.rewards.judge import quality_prompt


def unclipped(logps, old_logps, advantages, mask):
    return -(logps - old_logps).exp() * advantages[:, None]


@pytest.fixture
def compared(profile, tmp_path, monkeypatch):
    """`compare` with this test's folder; the runs are made in this process."""
    monkeypatch.setattr(grid, "usual_processes", lambda profile: 0)
    return partial(compare, profile=profile, output_dir=tmp_path)


ARMS = {
    "plain": {"rewards": [even_ids]},
    "loss": {"rewards": [even_ids], "surrogate": unclipped, "config": {"beta": 0.1}},
}


def test_arms_start_alike_and_are_judged_beside_the_first(compared, capsys):
    found = compared(ARMS, seeds=(3, 4), metric="reward")
    assert found.verdict == {"loss": "inconclusive"}
    assert found.summary["seeds"] == {"plain": [3, 4], "loss": [3, 4]}
    start = [curve["values"] for curve in found.summary["curves"]["reward"].values()]
    assert [values[0] for values in start[0]] == [values[0] for values in start[1]], "one start"
    text = found.table()
    assert "| arm | reward | minus the first | verdict | tokens | seconds |" in text
    assert "fresh seeds of this spread would decide" in text and "fewer than 5 seeds" in text
    assert found.plot().axes
    assert "2 seeds give no verdict, 5 are needed." in (said := capsys.readouterr().out)
    assert said.count("/4] ") == 4, "a line for each run"


def test_other_rows_model_or_function_are_another_run(compared, profile, tmp_path, capsys):
    data = tmp_path / "mine.csv"
    own = profile.with_data(str(data), test_share=0.5)
    for number in (1, 1, 2):
        rows = [f"What is {i} + {number}?,{i + number}" for i in range(8)]
        data.write_text("\n".join(["question,answer", *rows]))
        compared(ARMS, profile=own, seeds=[0], metric="reward")
    model = shutil.copytree(profile.policy, tmp_path / "model")
    for change in (False, True):
        if change:
            weights = load_file(model / "model.safetensors")
            save_file({k: 2 * w for k, w in weights.items()}, model / "model.safetensors")
        compared(ARMS, profile=own.with_policy(str(model)), seeds=[0], metric="reward")

    def even_ids(completion_ids, **columns):
        return [sum(i % 2 == 1 for i in ids) / len(ids) for ids in completion_ids]

    arms = {"plain": ARMS["plain"], "loss": ARMS["loss"] | {"rewards": [even_ids]}}
    compared(arms, profile=own.with_policy(str(model)), seeds=[0], metric="reward")
    said = capsys.readouterr().out
    finished = [int(n) for n in re.findall(r"compare: (\d) of 2 runs are finished", said)]
    assert finished == [0, 2, 0, 0, 0, 1]


def test_runs_go_to_processes_with_functions_of_no_module(profile, tmp_path):
    bonus = 0.25
    more = {"rewards": [lambda **columns: [bonus] * len(columns["answer"])]}
    arms = {"plain": {"rewards": [even_ids]}, "more": more}
    found = compare(arms, profile=profile, output_dir=tmp_path, seeds=[0], metric="reward")
    assert found.summary["final"]["more"]["reward"]["mean"] == 0.25


def test_a_verdict_says_better_worse_or_no_difference():
    up = [0.1, 0.12, 0.11, 0.1, 0.12]
    table = {"better": up, "worse": [-gain for gain in up], "no difference": [0.001, 0.0] * 3,
             "inconclusive": up[:4]}  # fmt: skip
    judged = judge([(values, "rises", 0.03) for values in table.values()])
    found = Comparison({}, dict(zip(table, judged, strict=True)), "eval/pass@1", 0.03)
    assert found.verdict == {name: name for name in table}


def test_the_seeds_that_would_decide_are_those_whose_interval_is_narrow_enough():
    (judged,) = judge([([0.05, -0.01, 0.04, 0.0, 0.02], "rises", 0.03)])
    assert judged.verdict == "inconclusive"
    wanted = int(seeds_to_decide(judged, 0.03).removeprefix("about "))
    needed = max(judged.mean, 0.03 - judged.mean)
    assert comparison.half_width(judged.sd, wanted, 1) < needed
    assert comparison.half_width(judged.sd, wanted - 1, 1) >= needed
    (wide,) = judge([([1.0, -1.0, 0.9, -0.9, 0.0], "rises", 0.03)])
    assert seeds_to_decide(wide, 0.03) == "more than 200"


def test_an_arm_that_uses_more_is_named():
    ends = {"tokens": {"mean": 1000.0}, "seconds": {"mean": 10.0}, "eval/pass@1": {"mean": 0.5}}
    more = ends | {"tokens": {"mean": 1300.0}, "seconds": {"mean": 10.5}}
    summary = {"final": {"plain": ends, "long": more, "same": ends}, "difference": {}}
    (said,) = Comparison(summary, {}, "eval/pass@1", 0.03).warnings()
    assert said.startswith("**long** used 1.3 times the tokens of **plain**")
    few = {"final": {"plain": ends | {"eval/pass@1": {"mean": 0.02}}}, "difference": {}}
    (said,) = Comparison(few, {}, "eval/pass@1", 0.03).warnings()
    assert said.startswith("No arm solves more than 2.0%")
    same = {"reward": {"values": [0.0, 0.0]}, "seconds": {"values": [0.1, -0.2]}}
    equal = {"final": {"plain": ends, "no clip": ends}, "difference": {"no clip": same}}
    (said,) = Comparison(equal, {}, "eval/pass@1", 0.03).warnings()
    assert said.startswith("**no clip** gave the same numbers as **plain**")


@pytest.mark.parametrize(
    ("arms", "options", "sentence"),
    [
        ({"plain": {}}, {}, "a comparison needs a baseline and another arm"),
        ({"a": {}, "b": {"reward": [even_ids]}}, {}, "arm 'b' has 'reward': choose among"),
        ({"a": {}, 2: {}}, {}, "arm 2 is {}: give a name and a dict"),
        ({"a": {}, "b": [even_ids]}, {}, "arm 'b' is .*: give a name and a dict"),
        ({"a 1": {}, "a-1": {}}, {}, "two arms of 'compare' would share a folder"),
        ({"a": {}, "b": {"rewards": even_ids}}, {}, "`rewards` is one function, not a list"),
        ({"a": {}, "b": {"surrogate": even_ids}}, {}, "surrogate hook even_ids cannot be called"),
        ({"a": {}, "b": {"config": {"beta": -1}}}, {}, "arm 'b': beta is -1; it should be greater"),
        ({"a": {}, "b": {"config": {"bta": 1}}}, {}, "arm 'b': bta is 1; GRPOConfig has no such"),
        ({"a": {}, "b": {"rewards": [lambda prompts: 0]}}, {}, "arm 'b': .*lacks the argument"),
        (
            {"a": {}, "b": {"surrogate": lambda lp, o, a, m: lp * a}},
            {},
            r"arm 'b': the surrogate hook <lambda> raised Runt.*\(test_c.* \(9, 40\) and \(9,\)",
        ),
        ({"a": {}, "b": {"batch_source": 5}}, {}, "batch_source is 5; give a function"),
        (
            {"a": {}, "b": {"config": {"eval_prompts": 0}}},
            {"metric": "pass@1"},
            "arm 'b': eval/pass@1 is never measured: give test rows",
        ),
        (ARMS, {"seeds": "0-4"}, "seeds are '0-4': give whole numbers"),
        (ARMS, {"seeds": []}, "there are no seeds"),
        (ARMS, {"correct": "accuracy"}, "correct is 'accuracy'; give a reward"),
        (ARMS, {"delta": 0}, "delta is 0: give the smallest difference that matters"),
        (ARMS, {"profile": "tinny"}, "no profile 'tinny': choose among smoke, tiny"),
    ],
)
def test_what_cannot_be_compared_is_said_before_any_run(arms, options, sentence, profile, tmp_path):
    options = {"profile": profile, "output_dir": tmp_path, **options}
    with pytest.raises((ValueError, TypeError), match=sentence):
        compare(arms, **options)
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_second_comparison_in_a_folder_is_refused_at_once(profile, tmp_path):
    with writing(tmp_path, "comparison"), pytest.raises(RuntimeError, match="writes a comparison"):
        compare(ARMS, profile=profile, seeds=[0], output_dir=tmp_path)


def test_a_metric_that_no_run_has_is_named_with_those_that_they_have(compared):
    with pytest.raises(ValueError, match="arm 'plain' have no 'eval/pass@9'; they have"):
        compared(ARMS, seeds=[0], metric="eval/pass@9")


def defined(source: str, name: str = "reward") -> object:
    """What a file of this source defines."""
    names = {"__name__": "idea"}
    exec(compile(source, "idea.py", "exec"), names)
    return names[name]


USED = [  # what a reward refers to, as `own`, and a change of it
    ("own = 1", "return own", "return [own]"),  # of its own code
    ("W = 2\ndef own(x):\n    return W * x", "W = 2", "W = 3"),  # a number that `own` reads
    ("W = 2\ndef own(x):\n    return W * x", "W * x", "W + x"),
    ("import re\nown = re.compile('a')", "'a'", "'b'"),
    ("own = range(3)", "3", "4"),
    ("from collections import deque\nown = deque([1])", "[1]", "[2]"),
    ("from decimal import Decimal\nown = Decimal('1.5')", "1.5", "1.6"),
    ("from types import SimpleNamespace\nown = SimpleNamespace(a=[1])", "[1]", "[2]"),
    ("def own(*, weight=1):\n    return weight", "weight=1", "weight=2"),
    ("from functools import cache\n@cache\ndef own(x):\n    return x + 1", "x + 1", "x + 2"),
    ("class Own:\n    @property\n    def w(self):\n        return 1\nown = Own()", "rn 1", "rn 2"),
    ("import dataclasses\n@dataclasses.dataclass(slots=True)\nclass Own:\n    w: int\nown = Own(1)",
     "Own(1)", "Own(2)"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "before", "after"), USED)
def test_a_change_of_what_a_function_uses_is_seen_and_its_use_is_not(source, before, after):
    source += "\ndef reward(**c):\n    return own\n"
    one, two = (defined(text) for text in (source, source.replace(before, after)))
    same = identity_of(one)
    one()
    commented = defined("# a comment\n" + source)
    assert identity_of(one) == identity_of(commented) == same != identity_of(two)


def test_modules_of_a_readers_modules_count(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_a.py").write_text("import own_b\n")
    found = []
    for weight in (1, 2):
        (tmp_path / "own_b.py").write_text(f"WEIGHT = {weight}\n")
        found.append(identity_of(defined("import own_a\ndef reward(**c):\n    return own_a\n")))
    assert found[0] != found[1]


def test_settings_closures_and_arguments_belong_to_a_function():
    class Weighted:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, **columns):
            return self.weight

    def closed(weight):
        return lambda **columns: weight

    for make in (Weighted, closed, partial(partial, even_ids)):
        for one, two in ((1, 2), ([1, [2]], [1, [3]]), (torch.tensor([1.0]), torch.tensor([2.0]))):
            assert identity_of(make(one)) == identity_of(make(one)) != identity_of(make(two))
    assert identity_of(Weighted(1).__call__) != identity_of(Weighted(2).__call__)


def fixed_judge(reply):
    """A judge that always says the same."""

    async def judge(conversations):
        return [reply] * len(conversations)

    judge.name, judge.prompt = "fixed", quality_prompt
    return judge


def test_every_setting_of_the_packages_rewards_counts_and_their_use_does_not(
    new_policy, tmp_path, monkeypatch
):
    monkeypatch.setenv("KEY", "a-key")
    model = torch.nn.Linear(3, 3)
    url = {"base_url": "http://127.0.0.1:1/v1", "api_key_env": "KEY"}
    pairs = [
        [partial(EndpointJudge, name, **url) for name in "ab"],
        [partial(QualityJudgeReward, EndpointJudge(name, **url)) for name in "ab"],
        [partial(QualityJudgeReward, fixed_judge(reply)) for reply in ("{}", "{1}")],
        [partial(LocalJudge, new_policy(seed)) for seed in (0, 1)],
        [partial(DiversityReward, 2, Letters(letters)) for letters in ("x", "y")],
        [partial(MetaEvaluationReward, new_policy(), questions) for questions in (["a"], ["b"])],
        [partial(MetaEvaluationReward, new_policy(), ["a", "b"], w) for w in ([0, 1], [1, 0])],
        [partial(CertaintyReward, new_policy(seed)) for seed in (0, 1)],
        [lambda: model, lambda: torch.nn.Linear(3, 3)],
    ]
    for one, two in pairs:
        assert identity_of(one()) == identity_of(one()) != identity_of(two()), one
    columns = {"prompts": [[{"role": "user", "content": "1?"}]] * 2, "completion_ids": [[5], [6]]}
    columns |= {"completions": ["x", "y"], "answer": ["1", "1"]}
    judged = QualityJudgeReward(fixed_judge("{}"), cache_dir=tmp_path)
    used = [make() for (make, _) in pairs[4:8]]
    before = [identity_of(reward) for reward in (judged, *used)]
    asyncio.run(judged(**columns))
    for reward in used:
        reward(**columns)
    assert before == [identity_of(reward) for reward in (judged, *used)]
    assert identity_of(judged) == identity_of(QualityJudgeReward(fixed_judge("{}")))


def test_each_of_many_functions_counts():
    """However many objects are described, and forgotten, before the one that has changed."""
    source = "\n".join(f"def f{i}(x):\n    return [x, {i}, (x, 'a{i}')]\n" for i in range(60))
    source += "def reward(**c):\n    return [" + ", ".join(f"f{i}(c)" for i in range(60)) + "]\n"
    same = identity_of(defined(source))
    for i in range(60):
        changed = source.replace(f"(x, 'a{i}')", f"(x, 'b{i}')")
        assert identity_of(defined(changed)) != same == identity_of(defined(source)), i


def test_the_identity_of_a_function_is_that_of_another_process(run_python):
    source = "from grpo_kit.rewards import *\ndef judge(x):\n    return {'a', 'b', 'c', 'dd'} & x\n"
    source += "judge.name, judge.prompt = 'own', format_reward\n"
    source += "asked = QualityJudgeReward(judge)\ndef reward(**c):\n    return asked(**c)\n"
    program = f"names = {{'__name__': 'idea'}}\nexec({source!r}, names)\n"
    program += "from grpo_kit.lab.identity import identity_of\nprint(identity_of(names['reward']))"
    said = {run_python(program, PYTHONHASHSEED=seed).strip() for seed in "123"}
    assert said == {identity_of(defined(source))}


def test_the_stored_comparison_is_what_its_runs_say(monkeypatch):
    folder = results_dir() / "idea"
    stored, problems = load(folder / "results", "tiny", "compare")
    monkeypatch.setattr(grid, "run_grid", lambda *_, **__: stored)
    found = compare(load_arms(folder / "idea.py"))
    assert not problems and found.table() == (folder / "comparison.md").read_text()
    assert found.verdict == {"0.01 a token": "no difference", "0.1 a token": "worse"}
