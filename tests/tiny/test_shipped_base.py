"""The shipped base: small, as its card says, and fit for what the notebooks do with it."""

import json
from statistics import fmean

import pytest
import torch

from grpo_kit.generation import reply
from grpo_kit.paths import data_dir
from grpo_kit.tasks.word_problems import HIGHEST, LOWEST, word_problems
from grpo_kit.tiny import problems, skills

FOLDER = data_dir() / "tiny-base"


@pytest.fixture(scope="module")
def written() -> dict:
    return json.loads((FOLDER / "card.json").read_text())


def test_it_is_small_and_safe(base):
    assert base.model.num_parameters() <= 4e6
    assert (FOLDER / "model.safetensors").stat().st_size <= 8e6
    assert not [path for path in FOLDER.iterdir() if path.suffix in (".bin", ".pt", ".py", ".pkl")]


def test_its_tags_survive_decoding_its_numbers_are_tokens_and_its_chat_ends_a_turn(base):
    text = "<think>1+1=2.</think><answer>2</answer>"
    assert base.decode(base.tokenizer([text])["input_ids"]) == [text]
    assert base.eos_token_ids == [base.tokenizer.convert_tokens_to_ids("<|end|>")]
    numbers = [f"{space}{i}" for i in range(LOWEST, HIGHEST + 1) for space in ("", " ")]
    assert {len(base.tokenizer(number)["input_ids"]) for number in numbers} == {1}


# What the base must measure: (skill, number, lowest, highest).
LIMITS = (
    ("solve", "greedy", 0.0, 0.50),
    ("solve", "pass@1", 0.0, 0.45),
    ("solve", "pass@8", 0.95, 1.0),
    ("meta", "auc", 0.70, 0.90),
    ("verify", "accuracy", 0.55, 0.75),
    ("verify", "yes_rate", 0.20, 0.80),
    ("judge", "parsed", 0.95, 1.0),
    ("judge", "spearman", 0.60, 1.0),
    ("plan", "episode_success", 0.25, 0.50),
)


def test_the_measured_skills_are_within_their_limits(written):
    """In every skill one style is right nine times in ten: RL raises only what is reliable."""
    for skill, name, low, high in LIMITS:
        assert low <= written["skills"][skill][name] <= high, (skill, name)
    for skill in ("solve", "verify", "plan"):
        styles = written["skills"][skill]["by_style"].values()
        assert max(style["accuracy"] for style in styles if style["share"] >= 0.03) >= 0.9


def test_the_card_is_true(base, written):
    """Measured again on other problems: within four standard errors of the card's number."""
    expected, n = written["skills"]["solve"]["pass@1"], 48
    rows, generator = word_problems().test.select(range(n)), torch.Generator().manual_seed(1)
    rollouts = reply(base, rows["prompt"], 8, max_new_tokens=96, generator=generator)
    texts = base.decode(rollouts.completion_lists())
    answers = [answer for answer in rows["answer"] for _ in range(8)]
    right = [skills.is_right(*pair) for pair in zip(answers, texts, strict=True)]
    error = (expected * (1 - expected) / n) ** 0.5 / 2  # samples of a problem are alike in part
    assert abs(fmean(right) - expected) < 4 * error
    for style in problems.RIGHT_STYLES:
        own = [hit for hit, text in zip(right, texts, strict=True)
               if problems.solution_style(text) == style]  # fmt: skip
        assert fmean(own) > 0.8, style
