"""The shipped base: small, as its card says, and fit for what the notebooks do with it."""

import json
import random

import pytest
import torch

from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.tiny import card, problems, skills

FOLDER = data_dir() / "tiny-base"


@pytest.fixture(scope="module")
def base():
    return PROFILES["tiny"].load_policy()


@pytest.fixture(scope="module")
def written() -> dict:
    return json.loads((FOLDER / "card.json").read_text())


def test_it_is_small_and_safe(base):
    assert base.model.num_parameters() <= 4e6
    assert (FOLDER / "model.safetensors").stat().st_size <= 8e6
    assert not [path for path in FOLDER.iterdir() if path.suffix in (".bin", ".pt", ".py", ".pkl")]


def test_its_tags_survive_decoding_and_its_chat_ends_a_turn(base):
    text = "<think>1+1=2.</think><answer>2</answer>"
    (decoded,) = base.decode(base.tokenizer([text])["input_ids"])
    assert decoded == text
    assert base.eos_token_ids == [base.tokenizer.convert_tokens_to_ids("<|end|>")]


def test_every_value_of_a_problem_is_one_token(base):
    for value in range(problems.LOWEST, problems.HIGHEST + 1):
        assert [len(base.tokenizer(text)["input_ids"]) for text in (f"{value}", f" {value}")] == [
            1,
            1,
        ]


def test_the_card_is_the_measured_table(written):
    assert (FOLDER / "README.md").read_text() == card.card_text(
        written["skills"], written["warm_up"]
    )


@pytest.mark.parametrize(("skill", "name", "low", "high"), card.LIMITS)
def test_every_number_of_the_card_is_within_its_limits(written, skill, name, low, high):
    assert low <= written["skills"][skill][name] <= high


@pytest.mark.parametrize("skill", ["solve", "verify", "plan"])
def test_every_skill_has_a_style_that_is_right_nine_times_in_ten(written, skill):
    styles = written["skills"][skill]["by_style"].values()
    assert max(style["accuracy"] for style in styles if style["share"] >= 0.03) >= 0.9


def test_the_card_is_true(base, written):
    """Measured again on other problems: within four standard errors of what the card says."""
    rng, n, samples = random.Random("another sample"), 48, 4
    asked = [problems.make_problem(rng, rng.choice(skills.DIFFICULTIES), "test") for _ in range(n)]
    texts = card.texts_of(
        base,
        [[{"role": "user", "content": problem.question}] for problem in asked],
        torch.Generator().manual_seed(1),
        num_generations=samples,
    )
    repeated = [problem for problem in asked for _ in range(samples)]
    right = [skills.is_right(p.answer, text) for p, text in zip(repeated, texts, strict=True)]
    told = written["skills"]["solve"]["pass@1"]
    error = (told * (1 - told) / n) ** 0.5 / 2  # samples of a problem are alike in part
    assert abs(sum(right) / len(right) - told) < 4 * error
