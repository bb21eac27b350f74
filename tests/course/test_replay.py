"""The replay: recording leaves a run alone, and the page obeys mouse and keys, and no model."""

import json
import re
from functools import partial

import pytest
import torch
from toy import TASK, configure, even_ids, killed_in, weights_of, without_times
from typer.testing import CliRunner

from grpo_kit.cli import app
from grpo_kit.course.replay import TEMPLATE, Recorder, page
from grpo_kit.flow import FlowGRPO
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.runs import REPLAY
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.training import train

HOSTILE = "</script><script>document.title = 'acted'</script><img src=x>\x1b[31m\u202eabc"


def records(folder) -> dict[int, list]:
    """The groups that were recorded at each step."""
    lines = [line for line in (folder / REPLAY).read_text().splitlines() if line.endswith("]}")]
    return {record["step"]: record["groups"] for record in map(json.loads, lines)}


def noisy(prompts, completions, completion_ids, **columns):
    """A reward that takes random numbers from torch's own stream."""
    shares = even_ids(prompts, completions, completion_ids)
    return [share + float(torch.rand(())) for share in shares]


def test_recording_changes_no_bit_of_the_run(new_policy, tmp_path):
    def run(folder, recorder=None):
        policy, options = new_policy(), {"output_dir": folder, "seed": 0, "record": recorder}
        torch.manual_seed(0)
        history = train(policy, TASK, [noisy], configure(), **options).history
        return weights_of(policy), without_times(history)

    (without, as_before), folder = run(tmp_path / "without"), tmp_path / "with"
    weights, history = run(folder, Recorder(folder, every=1, problems=2))
    assert torch.equal(weights, without) and history == as_before
    recorded = records(folder)
    assert list(recorded) == list(range(history[-1]["step"] + 1))
    one, other = recorded[0]
    assert one["prompt"] != other["prompt"] and len(one["rewards"]) == len(other["rewards"]) == 4
    rewards = torch.tensor(one["rewards"])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert one["advantages"] == pytest.approx(expected.tolist(), abs=1e-3)


def test_episodes_are_not_recorded_and_the_run_says_so_at_once(policy, tmp_path):
    system = PROFILES["tiny"].load_agents(policy)
    options = {"batch_source": partial(FlowGRPO, system=system), "record": Recorder(tmp_path)}
    given = policy, tool_questions(), [even_ids], configure(eval_prompts=0)
    with pytest.raises(ValueError, match="several turns are not recorded: leave `record` out"):
        train(*given, output_dir=tmp_path, seed=0, **options)


def test_a_killed_and_resumed_run_has_the_recording_of_an_unbroken_one(new_policy, tmp_path):
    def run(name, reward=even_ids, resume=False):
        options = {"output_dir": tmp_path / name, "seed": 0, "resume": resume}
        options["record"] = Recorder(tmp_path / name, every=1)
        train(new_policy(), TASK, [reward], configure(), **options)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", killed_in(5))  # before it: the records of steps 0, 1 and 2, two steps
    file = tmp_path / "killed" / REPLAY
    assert list(records(file.parent)) == [0, 1, 2]
    file.write_text(file.read_text() + '\n{"step": 3, "ans')
    run("killed", resume=True)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    run("killed")  # anew: nothing stays of the run before
    assert file.read_text() == (tmp_path / "whole" / REPLAY).read_text()


# --- the page -------------------------------------------------------------------------------------


def recording(folder):
    """Three steps of a group of answers by a hostile policy."""
    folder.mkdir()
    with open(folder / REPLAY, "w") as file:
        for step in (0, 5, 10):
            group = {"prompt": HOSTILE, "tokens": [[HOSTILE, " and"], ["x"]]}
            group |= {"rewards": [step, None], "advantages": [0.7, -0.7]}
            file.write(json.dumps({"step": step, "groups": [group]}) + "\n")
    return page(folder)


def test_a_folder_without_a_recording_is_told_what_to_do(tmp_path):
    said = CliRunner().invoke(app, ("replay", str(tmp_path)))
    assert said.exit_code == 2 and "holds no replay.jsonl of a run: record one" in said.output
    (tmp_path / "replay.jsonl").touch()
    said = CliRunner().invoke(app, ("replay", str(tmp_path)))
    assert said.exit_code == 2 and "holds no whole step: record the run anew" in said.output


def test_the_shipped_replays_are_small_and_of_the_present_template():
    pages = sorted((data_dir() / "replays").glob("*.html"))
    assert [file.stem for file in pages] == ["01_basic_grpo"]
    for text in (file.read_text() for file in pages):
        assert len(text.encode()) < 1_500_000
        for part in re.findall("<(?:style|script)>.*?</", TEMPLATE.read_text(), re.S):
            assert part in text, "data/replays/README.md says how to make it anew"


def test_mouse_and_keys_move_the_groups_and_what_a_policy_wrote_stays_text(browser, tmp_path):
    text = recording(tmp_path / "<i>run")
    assert not {"\u202e", "\x1b"} & set(text) and "<i>" not in text
    for scheme in ("light", "dark"):
        browser.open(text, tmp_path / "page.html", 360, scheme)
        assert browser.js("document.documentElement.scrollWidth") == 360
    assert browser.text("at") == "step 0 of 10"
    browser.drag("#step", 0.01, 0.5)
    assert browser.text("at") == "step 5 of 10"
    shown = browser.js("[...document.querySelectorAll('section')].filter(x => !x.hidden)"
                       ".map(x => x.innerText).join()")  # fmt: skip
    assert shown.startswith("Step 5") and "5.00" in shown and "not scored" in shown
    assert "document.title = 'acted'" in shown
    for key, step in (("End", 10), ("ArrowLeft", 5), ("Home", 0)):
        browser.press(key)
        assert browser.text("at") == f"step {step} of 10", key
    browser.js("document.body.append(Object.assign(document.createElement('script'), "
               "{textContent: 'document.title = 1'}))")  # fmt: skip
    assert browser.js("document.title") == "<i>run: replay" and not browser.js("document.images[0]")
