"""Own files: a function or the arms of one, and a sentence for each way in which there is none."""

import sys

import pytest

from grpo_kit.lab.ideas import load_arms, load_function
from grpo_kit.lab.identity import identity_of
from grpo_kit.rewards import accuracy_reward

MINE = """
import beside_idea
limit = 3

def short(completion_ids, **columns):
    return [-beside_idea.COST * len(ids) for ids in completion_ids]

arms = {"plain": {}, "short": {"rewards": [short]}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    files = {
        "my_idea.py": MINE, "beside_idea.py": "COST = 0.5", "note_idea.txt": "",
        "wrong_idea.py": "def f(:\n", "raises_idea.py": "limit = 3\nlimit / 0\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_a_function_of_a_file_or_of_the_kit(folder):
    short = load_function("my_idea.py:short")
    assert short(completion_ids=[[1, 2]]) == [-1.0]
    (own,) = load_arms("my_idea.py")["short"]["rewards"]
    assert identity_of(own) == identity_of(load_function(f"{folder}/my_idea.py:short"))
    assert load_function("accuracy") is load_function("accuracy_reward") is accuracy_reward


def test_what_a_function_takes_from_a_file_beside_its_own_belongs_to_it(folder):
    first = identity_of(load_function("my_idea.py:short"))
    (folder / "beside_idea.py").write_text("COST = 0.75")
    assert identity_of(load_function("my_idea.py:short")) != first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shorter", "has no reward 'shorter': choose one of accuracy_reward, .*FILE.py:NAME"),
        ("question_text", "has no reward 'question_text'"),
        ("my_idea.py", "the kit has no reward 'my_idea.py': .* give FILE.py:NAME"),
        ("none_idea.py:short", "there is no Python file 'none_idea.py'"),
        ("note_idea.txt:short", "there is no Python file 'note_idea.txt'.*, as FILE.py"),
        ("my_idea.py:long", "my_idea.py defines no function 'long'"),
        ("my_idea.py:limit", "my_idea.py defines no function 'limit'"),
        ("raises_idea.py:f", "line 2 of raises_idea.py raises ZeroDivisionError"),
        ("wrong_idea.py:f", "line 1 of wrong_idea.py raises SyntaxError"),
    ],
)
def test_what_is_no_function_ends_in_a_sentence(text, words):
    with pytest.raises(ValueError, match=words):
        load_function(text)
