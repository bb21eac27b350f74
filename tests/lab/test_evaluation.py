"""Published test sets: how answers are graded, strictly and leniently, and with which interval."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from scipy.stats import binomtest

from grpo_kit.generation import reply
from grpo_kit.lab.evaluation import GRADES, evaluate_test_set, grade_maths
from grpo_kit.tasks.published import math500

ROW = {
    "problem": "What is half of one?", "solution": "...", "answer": "\\frac{1}{2}",
    "subject": "Prealgebra", "level": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gold", "graded"),
    [
        ("<think>x</think><answer>48</answer>", "48", (True, True)),
        ("So it is 48.", "48", (False, True)),
        ("<answer>about 48</answer>", "48", (False, True)),
        ("<answer>47</answer>", "48", (False, False)),
        ("", "48", (False, False)),
    ],
)
def test_numbers_are_graded_by_the_tag_and_by_the_last_number(text, gold, graded):
    assert GRADES["gsm8k"](text, gold) == graded


@pytest.mark.parametrize(
    ("text", "gold", "graded"),
    [
        (r"<answer>\frac{1}{2}</answer>", r"\frac12", (True, True)),
        (r"so it is $\boxed{\frac{3}{4}}$.", r"\frac{3}{4}", (False, True)),
        (r"<answer>(3, \frac{\pi}{2})</answer>", r"\left( 3, \frac{\pi}{2} \right)", (True, True)),
        (r"<answer>\sqrt{5}</answer>", r"2\sqrt{5}", (False, False)),
        ("<answer>7, 8</answer>", "8", (False, True)),
        ("<answer>4, 2</answer>", "2,4", (True, True)),
        ("<answer>50%</answer>", "50", (True, True)),
        ("<think>maybe $8$</think><answer>7</answer>", "8", (False, False)),
        ("<answer></answer>", "8", (False, False)),
        ("<answer>" + "9" * 20_000 + "</answer>", "8", (False, False)),
    ],
)
def test_latex_is_compared_by_what_it_means(text, gold, graded):
    pytest.importorskip("math_verify", reason="pip install 'grpo-kit[math]'")
    assert grade_maths(text, gold) == graded


def test_without_math_verify_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(RuntimeError, match=r"grpo-kit\[math\]"):
        grade_maths("<answer>1</answer>", "1")


def test_a_test_set_is_counted_and_has_wilsons_interval(policy):
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(7)]

    def grade(text, gold):
        return int(gold) < 2, int(gold) < 5

    accuracy, shown = evaluate_test_set(policy, rows, grade, max_new_tokens=4, batch_size=2)
    assert (accuracy["strict"], accuracy["lenient"]) == pytest.approx((2 / 7, 5 / 7))
    interval = binomtest(2, 7).proportion_ci(method="wilson")
    assert (accuracy["strict/low"], accuracy["strict/high"]) == (interval.low, interval.high)
    assert 0 < accuracy["mean_length"] <= 4 and 0 <= accuracy["truncated"] <= 1
    assert accuracy["n"] == 7
    asked = [rows[i]["prompt"] for i in range(3)]
    first = reply(policy, asked, max_new_tokens=4, do_sample=False).completion_lists()
    assert shown == policy.decode(first)


def test_math500_of_a_folder(tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps(ROW) + "\n")
    (row,) = math500(tmp_path)
    system, user = row["prompt"]
    assert "answer in <answer> </answer> tags" in system["content"]
    assert "number" not in system["content"], "answers are not numbers there"
    assert user["content"] == ROW["problem"] and row["answer"] == ROW["answer"]
    (tmp_path / "test.jsonl").write_text('{"problem": "p"}')
    with pytest.raises(ValueError, match="row 1 of test.jsonl: .* lacks the texts"):
        math500(tmp_path)


def test_maths_is_compared_in_the_main_thread_or_not_at_all():
    pytest.importorskip("math_verify", reason="pip install 'grpo-kit[math]'")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(grade_maths, "<answer>1</answer>", "1")
        with pytest.raises(RuntimeError, match="in the main thread only"):
            late.result()
