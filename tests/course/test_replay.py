"""The replay: recording leaves a run alone, and the page is moved by hand, harmless, everywhere."""

import itertools
import json
import os
import shutil
import subprocess
import time
from functools import partial

import pytest
import torch
from toy import TASK, configure, even_ids, killed_in, weights_of, without_times
from typer.testing import CliRunner

from grpo_kit.cli import app
from grpo_kit.course.replay import Recorder, _records, page
from grpo_kit.flow import FlowGRPO
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.runs import HISTORY, REPLAY
from grpo_kit.tasks import Task
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.training import train

TOY = Task("toy", TASK.train, TASK.train.select([5]))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BIDI, HOSTILE = "\u202eabc", "</script><script>document.title = 'acted'</script><img src=x>\x1b[31m"


def noisy(prompts, completions, completion_ids, **columns):
    """A reward that takes random numbers from torch's own stream."""
    shares = even_ids(prompts, completions, completion_ids)
    return [share + float(torch.rand(())) for share in shares]


@pytest.mark.parametrize("kind", ["plain", "flow"])
def test_recording_changes_no_bit_of_the_run(kind, new_policy, tmp_path):
    def run(recorded: bool):
        torch.manual_seed(0)
        policy, task, options = new_policy(), TOY, {"rewards": [noisy], "config": configure()}
        if kind == "flow":
            profile, task = PROFILES["tiny"], tool_questions()
            policy = profile.load_policy()
            source = partial(FlowGRPO, system=profile.load_agents(policy, max_turns=3))
            config = configure(max_steps=2, max_completion_length=40, eval_prompts=0)
            options = {"rewards": [accuracy_reward], "config": config, "batch_source": source}
        folder = tmp_path / str(recorded)
        options["record"] = Recorder(folder, every=1, problems=1) if recorded else None
        run = train(policy, task, output_dir=folder, seed=0, **options)
        return weights_of(policy), without_times(run.history), folder

    (weights, history, folder), (without, as_before, _) = run(True), run(False)
    assert torch.equal(weights, without) and history == as_before
    records = _records(folder)
    assert list(records) == list(range(len(records))) and len(records) == history[-1]["step"] + 1
    answers = records[0]["answers"]
    assert [a["split"] for a in answers] == ["training"] * 4 + ["held-out"] * 4
    if kind == "flow":
        turns = max((a["turns"] for a in answers), key=len)
        assert turns[0]["memory"] == "empty" and turns[0]["result"] in turns[1]["memory"]
        assert turns[1]["memory"] in turns[1]["request"]


def test_then_is_the_sampler_and_now_the_last_policy(policy, tmp_path):
    recorder = Recorder(tmp_path, every=2)
    config = configure(temperature=0.7)
    train(policy, TASK, [even_ids], config, output_dir=tmp_path, seed=0, record=recorder)
    records = _records(tmp_path)
    assert list(records) == [0, 2, 3] and {record["last"] for record in records.values()} == {3}
    for step, record in records.items():
        turns = [turn for answer in record["answers"] for turn in answer["turns"]]
        for turn, now in zip(turns, record["now"], strict=True):
            ids = torch.tensor([turn["prompt_ids"] + turn["ids"]])
            logps = (policy.model(ids).logits[0, :-1] / 0.7).log_softmax(1)
            own = logps[-len(turn["ids"]) :].gather(1, ids[0, -len(turn["ids"]) :, None])[:, 0]
            assert own.tolist() == pytest.approx(now, abs=1e-3)
            assert len(turn["tokens"]) == len(turn["entropies"]) == len(now)
        then = [value for turn in turns for value in turn["then"]]
        same = then == pytest.approx([value for now in record["now"] for value in now], abs=1e-3)
        assert same == (step == 3)
    group = torch.tensor([answer["reward"] for answer in records[0]["answers"][:4]])
    expected = (group - group.mean()) / (group.std() + 1e-4)
    assert [a["advantage"] for a in records[0]["answers"][:4]] == pytest.approx(expected.tolist())


def test_a_killed_and_resumed_run_has_the_recording_of_an_unbroken_one(new_policy, tmp_path):
    def run(name, reward=even_ids, resume=False):
        folder = tmp_path / name
        options = {"output_dir": folder, "seed": 0, "record": Recorder(folder, every=1)}
        train(new_policy(), TASK, [reward], configure(), resume=resume, **options)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", killed_in(4))  # scored at steps 0, 1 (learnt from, then recorded), 2
    file = tmp_path / "killed" / REPLAY
    file.write_text(file.read_text() + '\n{"step": 2, "ans')
    run("killed", resume=True)
    assert _records(tmp_path / "killed") == _records(tmp_path / "whole")
    run("killed")  # begun anew, in the same folder
    assert len(file.read_text().split()) and file.read_text().count('"size"') == 4


# --- the page -------------------------------------------------------------------------------------


def recording(folder, flow=False):
    """Three steps of two problems' groups of two answers, all written by a hostile policy."""
    lines, texts = [], [HOSTILE, " and", BIDI]
    for step in (0, 5, 10):
        turn = {"tokens": texts, "then": [-0.5] * 3, "entropies": [0.1] * 3}
        told = {"request": HOSTILE, "call": "lookup(x)", "result": f"{step}", "verdict": ""}
        told = [told | {"memory": f"{HOSTILE} after {t}"} for t in range(2)] if flow else [{}]
        answers = [
            {
                "split": "training", "question": f"{HOSTILE} {i // 2}", "right": "1",
                "advantage": 0.7 - i % 2, "reward": step + i, "rewards": {"<b>r": None},
                "turns": [turn | more for more in told], "output": HOSTILE, "stopped": "verifier",
            }
            for i in range(4)
        ]  # fmt: skip
        lines.append({"step": step, "size": 2, "answers": answers})
        lines.append({"step": step, "last": 10, "now": [[-1.0] * 3] * 4 * len(told)})
    folder.mkdir()
    (folder / REPLAY).write_text("\n".join(map(json.dumps, lines)))
    rows = [{"step": s, "reward": s / 2, "entropy": float("nan")} for s in range(11)]
    (folder / HISTORY).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_a_policy_wrote_is_neither_markup_nor_control(tmp_path):
    text = page(recording(tmp_path / "<i>run"))
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text
    assert not {"\u202e", "\x1b"} & set(text) and "<i>" not in text and "http://" not in text[:900]
    assert "default-src 'none'" in text and "unsafe" not in text


def test_a_folder_without_a_recording_is_told_what_to_do(tmp_path):
    said = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert said.exit_code == 2 and "holds no replay.jsonl" in said.output
    assert "`grpo-kit train --replay`" in said.output
    (tmp_path / REPLAY).write_text('{"step": 0, "answers": [{}], "size": 1}')
    said = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert said.exit_code == 2 and "cannot be read (KeyError" in said.output
    said = CliRunner().invoke(app, ["train", "--engine", "trl", "--replay"])
    assert said.exit_code == 2 and "--replay is for the kit's trainer" in said.output


class Browser:
    """Headless Chromium, spoken to through its pipe in the protocol of its own tools."""

    def __init__(self, folder):
        (theirs, self.to), (self.by, own) = os.pipe(), os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe".split()
        shell = f'exec "$0" "$@" 3<&{theirs} 4>&{own}'
        command = ["bash", "-c", shell, CHROMIUM, *options, f"--user-data-dir={folder}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(theirs, own), **quiet)
        os.close(theirs), os.close(own)
        self.count, self.session, self.rest = itertools.count(1), {}, b""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}

    def __call__(self, method, **params):
        message = {"id": next(self.count), "method": method, "params": params, **self.session}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.by, 1 << 16) or pytest.fail("the browser ended")
            line, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == message["id"]:
                return answer["result"]

    def js(self, expression):
        result = self("Runtime.evaluate", expression=expression, returnByValue=True)["result"]
        return result.get("value")

    def drag(self, element, start, end):
        """Press at one share of an element's width, release at another."""
        box = self.js(
            f"JSON.stringify(document.querySelector('{element}').getBoundingClientRect())"
        )
        box = json.loads(box)
        middle = box["y"] + box["height"] / 2
        for kind, share in (("Pressed", start), ("Moved", end), ("Released", end)):
            held = {"button": "left", "buttons": int(kind != "Released"), "clickCount": 1}
            where = {"x": box["x"] + share * box["width"], "y": middle}
            self("Input.dispatchMouseEvent", type=f"mouse{kind}", **where, **held)

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            code = {"End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}[key]
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def open(self, text, file, width=1200, scheme="light"):
        file.write_text(text)
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self("Emulation.setDeviceMetricsOverride", **screen)
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self("Emulation.setEmulatedMedia", features=[wanted])
        self("Page.navigate", url=file.as_uri())
        for _ in range(100):
            if self.js("location.protocol == 'file:' && document.readyState == 'complete'"):
                return
            time.sleep(0.1)
        pytest.fail("the page did not load")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("needs chromium")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.process.terminate()
    browser.process.wait(timeout=30)


def test_mouse_and_keys_move_the_group_and_hostile_texts_stay_texts(browser, tmp_path):
    browser.open(page(recording(tmp_path / "run")), tmp_path / "page.html")
    shown = partial(browser.js, "document.getElementById('at').textContent")
    assert shown() == "step 0 of 10"
    browser.drag("#step", 0.01, 0.5)
    group = partial(browser.js, "document.getElementById('group').textContent")
    assert shown() == "step 5 of 10" and "reward 6.00 (<b>r not scored)" in group()
    assert "reward: 2.500 at step 5" in browser.js("document.body.textContent")
    for key, step in (("End", 10), ("ArrowLeft", 5), ("Home", 0), ("ArrowRight", 5)):
        browser.press(key)
        assert shown() == f"step {step} of 10", key
    browser.drag("svg", 0.5, 0.95)
    assert shown() == "step 10 of 10"
    assert HOSTILE.replace("\x1b", "\\u001b") in group() and "\\u202eabc" in group()
    assert browser.js("document.title") == "run: replay"
    assert browser.js("document.images.length + document.scripts.length") == 2
    browser.js("document.querySelector('.tokens span').focus()")
    browser.press("ArrowRight")
    told = browser.js("document.getElementById('token').textContent")
    assert told.startswith("token 2 of 3 “ and”: probability then 0.607, now (step 10) 0.368")
    ring = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.js(ring) == "solid" and "entropy 0.10 nats" in told
    browser.js("document.body.append(Object.assign(document.createElement('script'), "
               "{textContent: 'document.title = 1'}))")  # fmt: skip
    assert browser.js("document.title") == "run: replay", "the page's policy lets it act"


def test_episodes_are_stepped_through_on_a_dark_phone(browser, tmp_path):
    text = page(recording(tmp_path / "run", flow=True))
    looks = []
    for scheme in ("light", "dark"):
        browser.open(text, tmp_path / "page.html", 360, scheme)
        assert browser.js("document.documentElement.scrollWidth") == 360
        looks.append(browser.js("getComputedStyle(document.body).backgroundColor"))
    assert looks == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]
    group = partial(browser.js, "document.getElementById('group').textContent")
    assert "memory before turn 1" in group() and "lookup(x) → 0" in group()
    assert "final output" not in group() and "advantage +0.70" in group()
    for box, value in (("episode", 1), ("turn", 1)):
        label = (
            f"[...document.querySelectorAll('label')].find(l => l.textContent.startsWith('{box}'))"
        )
        browser.js(
            f"{{ const s = {label}.querySelector('select'); s.value = {value}; s.onchange() }}"
        )
    assert "episode 2: advantage −0.30" in group() and "after 1" in group()
    assert "final output (ended by the verifier)" in group()
