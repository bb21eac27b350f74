"""Own files: a function or the arms of one, and a sentence for each way in which there is none."""

import sys

import pytest

from grpo_kit.lab.ideas import load_arms, load_function
from grpo_kit.rewards import accuracy_reward, maths_reward

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
        "my_idea.py": MINE, "beside_idea.py": "COST = 0.5", "list_idea.py": "arms = [1]",
        "numbers.py": "", "note_idea.txt": "", "wrong_idea.py": "def f(:\n",
        "raises_idea.py": "limit = 3\nlimit / 0\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_a_function_of_a_file_or_of_the_kit(folder):
    short = load_function("my_idea.py:short")
    assert short(completion_ids=[[1, 2]]) == [-1.0]
    assert load_function(f"{folder}/my_idea.py:short") is short, "a file is imported once"
    assert load_arms("my_idea.py")[0]["short"]["rewards"] == [short]
    assert load_function("accuracy") is load_function("accuracy_reward") is accuracy_reward
    assert load_function("maths_reward") is maths_reward


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shorter", "has no reward 'shorter': choose one of accuracy_reward, .*FILE.py:NAME"),
        ("question_text", "has no reward 'question_text'"),
        ("my_idea.py", "'my_idea.py' names no function: write FILE.py:NAME"),
        ("none_idea.py:short", "none_idea.py is no Python file .there is no such file"),
        ("note_idea.txt:short", "note_idea.txt is no Python file .its name does not end in .py"),
        ("my_idea.py:long", "'long' of my_idea.py is not defined there.*it defines short"),
        ("my_idea.py:limit", "'limit' of my_idea.py is no function.*it defines short"),
        ("numbers.py:short", "numbers.py has the name of another module.*another name"),
        ("raises_idea.py:f", "line 2 of raises_idea.py raises ZeroDivisionError.*Correct it"),
        ("wrong_idea.py:f", "line 1 of wrong_idea.py raises SyntaxError.*Correct it"),
    ],
)
def test_what_is_no_function_ends_in_a_sentence(text, words):
    with pytest.raises(ValueError, match=words):
        load_function(text)


@pytest.mark.parametrize(("file", "words"), [("beside", "has no `arms`"), ("list", "is a list")])
def test_a_file_without_arms_is_named(file, words):
    with pytest.raises(ValueError, match=f"{file}_idea.py.* {words}|{file}_idea.py {words}"):
        load_arms(f"{file}_idea.py")
