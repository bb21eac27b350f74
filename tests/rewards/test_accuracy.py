"""The accuracy reward: what counts as the same number, and what a policy cannot get away with."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.rewards import accuracy_reward, extract_answer, is_correct, parse_number
from grpo_kit.tasks.answers import MAX_CHARS, MAX_EXPONENT


def score(completions, answer):
    return accuracy_reward([], completions, [], answer=answer)


# --- One number, many ways to write it ------------------------------------------------------------

NUMBERS = {
    "15": ["15", " 15\n", "15.", "+15", "$15", "US$15", "15€", "15 ¥", "15 coins", "15 coins.",
           "15kg", "15 m²", "15 m^2", "15 (fifteen)", "**15**", "`15`", "$15$", r"\(15\)",
           r"\boxed{15}", r"\boxed{15 \text{ coins}}", r"15\%", r"\[15\]", r"\[ \boxed{15} \].",
           r"\textbf{15}", r"\mathbf{15}.", "$$15$$", "**15**.", r"**\(15\)**",
           r"\textbf{15} coins"],
    # U+2212 is what models write
    "-15": ["-15", "−15", "–15", "-$15", "$-15"],
    "0": ["-0"],
    "7": ["007"],
    # decimals, commas, exponents, scales
    "7/2": ["3.50"],
    "5": ["5.", "$5 per hour", "5k", "5e"],
    "1080": ["1,080", "1.08e3", "1.08×10^3", r"\$1{,}080", r"1\,080"],
    "6172839/5": ["1,234,567.80"],
    "1/1000": ["1E-3"],
    "300": [r"3 \times 10^{2}"],
    "1200000000": ["$1.2 Billion dollars"],
    # fractions
    "1/2": ["1/2", ".5", "1/2 cup", r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", r"\frac12",
            r"\frac1{2}", r"\dfrac{1}2", r"\cfrac{1}{2}", r"\left(\frac{1}{2}\right)",
            r"\displaystyle\frac12"],
    "-1/2": ["-1/2", "$-1/2", r"-\frac{1}{2}", r"\boxed{-\frac{1}{2}}", r"-\left(\frac12\right)"],
    "3/2": ["6 / 4", "1 1/2", r"1\frac{1}{2}", r"1\frac12"],
    "-3/2": ["-1 1/2"],
    "1000/3": ["1,000/3"],
    # currency, percent, units
    "2161/2": ["€ 1,080.50"],
    "50": ["50¢", "50%", "50 % of the coins"],
    "25/2": ["12.5 kg"],
    "60": ["60 km/h", "60/hour"],
    "6": ["6-inch"],
    "90": ["90 °C", r"90^\circ", r"90^{\circ}", r"$90^\circ$."],
    "2": ["2 dozen"],
    "3": ["3 o'clock"],
}  # fmt: skip

NOT_NUMBERS = [
    "", " ", ".", "-", "$", "%", "/", "fifteen", "about 15", "x = 15", "15 or 16", "15, 16",
    "15 16", "15-16", "15 coins and 3 pears", "10:30", "3 + 4", "3*4", "2^3", "2²", "5!",
    "(15)",  # in bookkeeping that is -15
    "- 15",  # in Markdown that is an item of a list
    "--15", "-$-15", "1,5", "1,50", "12,34,567", "0,123", "1 000", "1_000", "1.2.3", "1/2/3",
    "1.5/2", "1/-2", "1/0", "0/0", "1 1/0", r"\frac{1}{0}", r"\frac{1}{2}3",
    r"\frac123", r"3\left(\frac12\right)", r"\left(3,400\right)", r"\text{7} or \text{8}",
    "$7$ or $8$", "½", "1½", "inf",
    "nan", "0x1F", "15 is what I first thought but no",
    # a long s, which IGNORECASE takes for an s, and a dotless i
    "2 thouſand", "2 millıon",
    # figures and numerals of other scripts; int() would read the first four
    "１５", "١٥", "१५", "1５", "十五", "15五", "Ⅻ", "²", "①",
    "2x - y", "12 dollars - total",
    # too long to be an answer
    "9" * (MAX_CHARS + 1), "9" * 100_000, "1e999999999", "1e-999999999", f"1e{MAX_EXPONENT + 1}",
    "1e" + "9" * 150, "1" + ",000" * 50_000, "1 " * 100_000 + "1", "1/" + "0" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("value", NUMBERS)
def test_number_is_read_exactly(value):
    numbers = {text: parse_number(text) for text in NUMBERS[value]}
    assert numbers == dict.fromkeys(NUMBERS[value], Fraction(value))


@pytest.mark.parametrize("text", NOT_NUMBERS, ids=lambda text: repr(text[:20]))
def test_what_is_not_one_number_is_none(text):
    assert parse_number(text) is None


def test_comparison_is_exact_where_floats_are_not():
    assert not is_correct("0.3333333333333333", "1/3")
    assert not is_correct("9007199254740993", "9007199254740992")  # equal as floats


integers = st.integers(-(10**12), 10**12).map(Decimal)
decimals = st.decimals(-(10**9), 10**9, places=4)
wrappers = st.sampled_from(
    ["{}", " {}\n", "{}.", "{} coins", "{} coins.", "{}%", "**{}**", r"\boxed{{{}}}", "{} kg/m²"]
)


@given(integers | decimals, wrappers, st.booleans(), st.integers(0, 5))
def test_integers_and_decimals_round_trip(number, wrapper, commas, zeros):
    text = f"{number:,f}" if commas else f"{number:f}"
    text += "0" * zeros if "." in text else ""
    assert parse_number(wrapper.format(text)) == Fraction(number)
    assert parse_number(f"{number:E}") == Fraction(number)


@given(st.fractions(max_denominator=10**6), wrappers)
def test_fractions_round_trip(number, wrapper):
    assert parse_number(wrapper.format(number)) == number


@given(st.text(alphabet="0123456789.,/-+$%e ^{}\\x×½²acfr()*٣五", max_size=30))
def test_any_text_gives_a_fraction_or_none(text):
    assert isinstance(parse_number(text), Fraction | None)
    lenient = extract_answer(text, lenient=True)
    assert lenient is None or parse_number(lenient) is not None


# --- Finding the answer ---------------------------------------------------------------------------

TAGGED = {
    "15": ["<think>7</think><answer>15</answer>", "<answer>\n 15 \n</answer>"],
    "": ["<answer></answer>"],
    "1": ["<answer>1</answer><answer>2"],  # cut off before the second answer was complete
    "2": ["<answer>1</answer> no, <answer>2</answer>", "<answer>1 <answer>2</answer>",
          "<answer><answer>2</answer></answer>", "<answer>2</answer></answer>",
          "</answer><answer>2</answer>",
          "<think><answer>2</answer></think>"],  # format is another reward's matter
    None: ["15", "", "<answer>15", "15</answer>", "</answer>15<answer>", "<ANSWER>15</ANSWER>",
           "<answer >15</answer>", "The answer is 15", "#### 15", r"\boxed{15}"],
}  # fmt: skip


@pytest.mark.parametrize("answer", TAGGED)
def test_the_last_complete_answer_counts(answer):
    assert {extract_answer(text) for text in TAGGED[answer]} == {answer}


LENIENT = {
    "Yes": ["<answer>Yes</answer>"],
    "$15": ["<think>7</think><answer>$15</answer> 8"],
    "15": ["<answer>The answer is 15.</answer> 8"],
    "$7": ["10-3 = $7."],
    "3": ["10 - 3", "(10)-3"],
    "-3": ["it falls to -3 degrees", "it falls to −3"],
    "1,080": ["we have 5, so 1,080 coins.", r"so \boxed{1{,}080}"],
    "1 1/2": ["1 1/2 cups"],
    "2.5 million": ["about 2.5 million."],
    "$ 1/2": [r"so $\frac{1}{2}$"],
    "$-1/2": [r"so $-\frac{1}{2}$"],
    "500": ["Rs.500"],
    "9": [r"so it is \boxed{9} \pmod{11}", r"<answer>\boxed{9} \pmod{11}</answer>",
          r"\boxed{3}, no: \boxed{x = 9} in 2 steps", r"\boxed{9} and \boxed{11"],
    "$16386.17": [r"\boxed{\$16386.17} after 5 years"],
    "1/2": [r"\(\boxed{\frac12}\) of 3"],
    r"\text{Yes}": [r"\boxed{\text{Yes}}, all 7"],
    "42": ["#### 42 (see step 3)", "#### 7\n#### 42 of 50", "6*7=42 ####"],
    "5": ["5 apples, then 1/0", "5 apples, then 1e999", "5, then 1,23,4 and 3.14.15 and x2"],
    None: ["Yes", ""],
}  # fmt: skip


@pytest.mark.parametrize("answer", LENIENT)
def test_lenient_takes_the_marked_number_or_else_the_last(answer):
    found = {text: extract_answer(text, lenient=True) for text in LENIENT[answer]}
    assert found == dict.fromkeys(LENIENT[answer], answer)


HOSTILE = [
    "<answer>" * 50_000, "</answer>" * 50_000, "<answer>" * 50_000 + "</answer>",
    "<answer>15" * 50_000, "<answer>" + "9" * 100_000 + "</answer>",
    "<answer>1e999999999</answer>", "<answer>15/0</answer>",
    "<answer>" + " " * 100_000 + "15 16</answer>", "<answer>" + "1 " * 100_000 + "</answer>",
    "<answer>" + "$" * 100_000 + "</answer>", "<answer>" + "**" * 100_000 + "</answer>",
    "<answer>" + r"\frac{" * 20_000 + "</answer>",
    "<answer>" + r"\boxed{" * 20_000 + "15</answer>", "<answer>" + "½" * 20_000 + "</answer>",
    "<answer>" + "^" + " " * 100_000 + "</answer>", r"\left(" + " " * 100_000, "#### " * 20_000,
    "<answer>" + r"\[ " * 50_000 + "</answer>", r"\boxed{" * 20_000 + "}" * 20_000,
    "<answer>" + ",000" * 50_000 + "</answer>", "1" + " " * 100_000 + "/", "1.5 x 10^" * 20_000,
    "\x00<answer>\ud800</answer>",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:24]!r}-{len(text)}")
def test_hostile_completions_score_nothing_and_finish(text):
    assert score([text], ["15"]) == [0.0]
    assert not is_correct(extract_answer(text, lenient=True), "16.5")


# --- The reward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gold", [15, 15.0, Decimal("15.00"), Fraction(30, 2), "15", "$15", " 15 "])
def test_gold_may_be_text_or_a_number(gold):
    right, wrong = "<answer>15</answer>", "<answer>15.01</answer>"
    assert score([right, wrong], [gold] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("gold", [None, "", "  ", float("nan")])
def test_without_a_gold_answer_the_completion_is_unscored_and_its_siblings_are_not(gold):
    assert score(["<answer>15</answer>"] * 3, ["15", gold, "15"]) == [1.0, None, 1.0]


@pytest.mark.parametrize(
    ("answer", "gold", "correct"),
    [
        ("Yes", "Yes", True), (" yes. ", "Yes", True), ("**YES**", "yes", True),
        ("No", "Yes", False), ("Yes and no", "Yes", False), ("1", "Yes", False),
        ("10:30", "10:30", True), ("10:3", "10:30", False), ("new   York", "New York", True),
        ("STRASSE", "Straße", True), ("", "...", False), ("fifteen", "15", False),
        (None, "15", False),
    ],
)  # fmt: skip
def test_gold_that_is_no_number_is_compared_as_text(answer, gold, correct):
    assert is_correct(answer, gold) is correct


def test_a_tool_result_cannot_bring_in_the_answer():
    turns = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "<answer>15</answer>"},
    ]
    answered = [*turns, {"content": "<answer>15</answer>"}]  # the assistant's, if no role is named
    assert score([turns, answered], ["15"] * 2) == [0.0, 1.0]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="shorter"):
        score(["a", "b"], ["15"])
    with pytest.raises(TypeError, match=r"\['15'\].*text, a number or None"):
        score(["a"], [["15"]])
    with pytest.raises(TypeError, match="not int: decode token ids"):
        score([15], ["15"])
