"""The replay: recording leaves a run alone, and the page obeys mouse and keys, and no model."""

import json
import re
from functools import partial

import pytest
import torch
from toy import TASK, configure, even_ids, killed_in, plain_logps, weights_of, without_times
from typer.testing import CliRunner

from grpo_kit.cli import app
from grpo_kit.course.replay import TEMPLATE, Recorder, _records, page
from grpo_kit.flow import FlowGRPO
from grpo_kit.lab.report import write_report
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.runs import HISTORY, REPLAY
from grpo_kit.tasks import Task
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.training import train

HOSTILE = "</script><script>document.title = 'acted'</script><img src=x>\x1b[31m\u202eabc"
SHOWN = HOSTILE.replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")


def noisy(prompts, completions, completion_ids, **columns):
    """A reward that takes random numbers from torch's own stream."""
    shares = even_ids(prompts, completions, completion_ids)
    return [share + float(torch.rand(())) for share in shares]


@pytest.mark.parametrize("kind", ["plain", "flow"])
def test_recording_changes_no_bit_of_the_run(kind, new_policy, tmp_path):
    def run(folder, recorder=None):
        policy, task = new_policy(), Task("toy", TASK.train, TASK.train.select([5]))
        options = {"rewards": [noisy], "config": configure()}
        if kind == "flow":
            policy, task = PROFILES["tiny"].load_policy(), tool_questions()
            system = PROFILES["tiny"].load_agents(policy, max_turns=3)
            config = configure(max_steps=2, max_completion_length=40, eval_prompts=0)
            options = {"rewards": [accuracy_reward], "config": config}
            options["batch_source"] = partial(FlowGRPO, system=system)
        torch.manual_seed(0)
        history = train(
            policy, task, output_dir=folder, seed=0, record=recorder, **options
        ).history  # fmt: skip
        return weights_of(policy), without_times(history)

    (without, as_before), folder = run(tmp_path / "without"), tmp_path / "with"
    weights, history = run(folder, Recorder(folder, every=1, problems=1))
    assert torch.equal(weights, without) and history == as_before
    records = _records(folder)
    assert list(records) == list(range(history[-1]["step"] + 1))
    answers = records[0]["answers"]
    assert [a["split"] for a in answers] == ["training"] * 4 + ["held-out"] * 4
    if kind == "flow":
        first, second, *_ = max((a["turns"] for a in answers), key=len)
        assert first["memory"] == "empty" and first["result"] in second["memory"]
        assert second["memory"] in second["request"]


def test_then_is_of_the_sampler_and_now_of_the_last_policy(policy, tmp_path):
    recorder, config = Recorder(tmp_path, every=2), configure(temperature=0.7)
    train(policy, TASK, [even_ids], config, output_dir=tmp_path, seed=0, record=recorder)
    records = _records(tmp_path)
    assert list(records) == [0, 2, 3]
    for step, record in records.items():
        turns = [turn for answer in record["answers"] for turn in answer["turns"]]
        for turn in turns:
            logps = plain_logps(policy.model, turn["prompt_ids"], turn["ids"], 0.7)
            assert logps.tolist() == pytest.approx(turn["now"], abs=1e-3)
            assert len(turn["tokens"]) == len(turn["entropies"]) == len(turn["ids"])
        then, now = ([value for turn in turns for value in turn[at]] for at in ("then", "now"))
        assert (then == pytest.approx(now, abs=2e-3)) == (step == 3)
    group = records[0]["answers"][:4]
    rewards = torch.tensor([answer["reward"] for answer in group])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert [a["advantage"] for a in group] == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_killed_and_resumed_run_has_the_recording_of_an_unbroken_one(new_policy, tmp_path):
    def run(name, reward=even_ids, resume=False):
        options = {"output_dir": tmp_path / name, "seed": 0, "resume": resume}
        options["record"] = Recorder(tmp_path / name, every=1)
        train(new_policy(), TASK, [reward], configure(), **options)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", killed_in(5))  # before it: the records of steps 0, 1 and 2, two steps
    file = tmp_path / "killed" / REPLAY
    assert list(_records(file.parent)) == [0, 1, 2]
    file.write_text(file.read_text() + '\n{"step": 3, "ans')
    run("killed", resume=True)
    assert _records(tmp_path / "killed") == _records(tmp_path / "whole")
    run("killed")  # anew: nothing stays of the run before
    assert file.read_text() == (tmp_path / "whole" / REPLAY).read_text()


# --- the page -------------------------------------------------------------------------------------


def recording(folder, turns=1):
    """Three steps of two problems with two answers each, all written by a hostile policy."""
    folder.mkdir()
    with open(folder / REPLAY, "w") as file:
        for step in (0, 5, 10):
            turn = {"tokens": [HOSTILE, " and"], "then": [-0.5] * 2, "entropies": [0.1] * 2}
            told = {"request": HOSTILE, "call": "lookup(x)", "result": f"{step}", "verdict": ""}
            answers = [
                {
                    "split": "training", "question": f"{HOSTILE}{i // 2}", "right": "1",
                    "advantage": 0.7 - i % 2, "reward": step + i, "rewards": {"<b>": float("nan")},
                    "output": HOSTILE, "stopped": "verifier", "turns": [
                        turn | (told | {"memory": f"after {t}"} if turns > 1 else {})
                        for t in range(turns)
                    ],
                }
                for i in range(4)
            ]  # fmt: skip
            file.write(json.dumps({"step": step, "size": 2, "answers": answers}) + "\n")
            file.write(json.dumps({"step": step, "now": [[-1.0] * 2] * 4 * turns}) + "\n")
    rows = [{"step": s, "reward": s / 2, "entropy": float("nan")} for s in range(11)]
    (folder / HISTORY).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return page(folder)


def test_a_folder_without_a_recording_is_told_what_to_do(tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / REPLAY).write_text('{"step": 0, "size": 1}')
    for arguments, sentence in {
        ("replay", str(tmp_path)): "holds no replay.jsonl of a run: record one by `grpo-kit train",
        ("replay", str(tmp_path / "damaged")): "cannot be read (KeyError",
        ("train", "--engine", "trl", "--replay"): "--replay is for the kit's trainer",
    }.items():
        said = CliRunner().invoke(app, arguments)
        assert said.exit_code == 2 and sentence in said.output


def test_the_report_links_the_replays_of_recorded_runs_and_names_damaged_ones(tmp_path):
    text = recording(tmp_path / "a run")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / REPLAY).write_text('{"step": 0}')
    report = write_report(tmp_path, tmp_path / "no results").read_text()
    assert 'href="a%20run/replay.html"' in report and "bad/replay.html" not in report
    assert (tmp_path / "a run" / "replay.html").read_text() == text
    assert f"{tmp_path / 'bad' / REPLAY} cannot be read" in report


def test_the_shipped_replays_are_small_and_of_the_present_template():
    pages = sorted((data_dir() / "replays").glob("*.html"))
    assert [file.stem for file in pages] == ["01_basic_grpo", "06_flow_grpo"]
    for text in (file.read_text() for file in pages):
        assert len(text.encode()) < 600_000
        for part in re.findall("<(?:style|script)>.*?</", TEMPLATE.read_text(), re.S):
            assert part in text, "`python -m grpo_kit.course.replay` makes it anew"


def test_mouse_and_keys_move_the_group_and_what_a_policy_wrote_stays_text(browser, tmp_path):
    text = recording(tmp_path / "<i>run")
    assert text.isascii() is False and not {"\u202e", "\x1b"} & set(text) and "<i>" not in text
    browser.open(text, tmp_path / "page.html")
    assert browser.text("at") == "step 0 of 10"
    browser.drag("#step", 0.01, 0.5)
    assert browser.text("at") == "step 5 of 10"
    assert "reward 6.00 (<b> not scored)" in browser.text("group")
    assert browser.text("curves").endswith("reward: 2.500 at step 5")
    for key, step in (("End", 10), ("ArrowLeft", 5), ("Home", 0), ("ArrowRight", 5)):
        browser.press(key)
        assert browser.text("at") == f"step {step} of 10", key
    browser.drag("svg", 0.5, 0.95)
    assert browser.text("at") == "step 10 of 10"
    browser.js("document.querySelector('.tokens span').focus()")
    browser.press("ArrowRight")
    told = "token 2 of 2 “ and”: probability then 0.607, now (step 10) 0.368; entropy 0.10 nats"
    assert browser.text("token") == told
    assert browser.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert SHOWN in browser.text("group") and SHOWN in browser.text("question")
    browser.js("document.body.append(Object.assign(document.createElement('script'), "
               "{textContent: 'document.title = 1'}))")  # fmt: skip
    assert browser.js("document.title") == "<i>run: replay" and not browser.js("document.images[0]")


def test_episodes_are_stepped_through_on_a_phone_light_and_dark(browser, tmp_path):
    text, looks = recording(tmp_path / "run", turns=2), []
    for scheme in ("light", "dark"):
        browser.open(text, tmp_path / "page.html", 360, scheme)
        assert browser.js("document.documentElement.scrollWidth") == 360
        looks.append(browser.js("getComputedStyle(document.body).backgroundColor"))
    assert looks == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]
    first = browser.text("group")
    assert "advantage +0.70" in first and "after 0" in first and "lookup(x) → 0" in first
    assert SHOWN in first and "final output" not in first
    browser.js("chosen.value = 1; chosen.onchange(); turns.focus()")
    browser.press("ArrowRight")
    second = browser.text("group")
    assert "episode 2: advantage −0.30" in second and "after 1" in second
    assert "final output (ended by the verifier)" in second
