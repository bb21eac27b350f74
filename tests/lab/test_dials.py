"""A dial: each arm in each setting, and the effect against what is turned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from grpo_kit.lab import dials
from grpo_kit.lab.experiments import EXPERIMENTS, arm_of, experiment_of, of_neighbour
from grpo_kit.lab.records import Record
from grpo_kit.lab.summary import summarise
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import random_reward

ENTRY = {
    "question": "When?", "turned": "updates", "of": "change",
    "settings": {"1": {"num_iterations": 1}, "4": {"num_iterations": 4}},
    "arms": {"plain": {"rewards": "plain"}, "soft": {"rewards": "plain", "surrogate": "sapo"}},
}  # fmt: skip
CONFIG = {"max_steps": 1, "generation_batch_size": 8, "eval_prompts": 0}


def record(arm: str, seed: int, start: float, end: float) -> Record:
    rows = [
        {"step": i, "num_generated_tokens": i, "eval/pass@1": v} for i, v in ((0, start), (1, end))
    ]
    return Record(
        experiment="dial-x", arm=arm, profile="tiny", seed=seed, config=CONFIG, start={},
        versions={}, commit="", machine={"accelerator": "none"}, finished="", seconds=1.0,
        evaluation={"eval/pass@1": end}, history=rows,
    )  # fmt: skip


def test_each_arm_is_made_in_each_setting():
    experiment = experiment_of(ENTRY)
    assert list(experiment.arms) == ["plain, 1", "plain, 4", "soft, 1", "soft, 4"]
    assert dials.arms_of(experiment) == ["plain", "soft"]
    updates = [
        experiment.setting(PROFILES["tiny"], arm)[1].num_iterations for arm in experiment.arms
    ]
    assert updates == [1, 4, 1, 4]


def test_the_effect_is_a_difference_of_pairs_and_settings_without_runs_are_left_out():
    experiment = experiment_of(ENTRY)
    runs = [record("plain, 1", s, 0.4, 0.5 + s / 10) for s in range(3)]
    runs += [record("soft, 1", s, 0.4, 0.7 + s / 10) for s in range(3)]
    found = dials.turned(runs, experiment)
    assert list(found["plain"]) == ["1"] and found["plain"]["1"]["mean"] == pytest.approx(0.2)
    assert found["soft"]["1"]["minus"]["mean"] == pytest.approx(0.2)
    assert found["soft"]["1"]["minus"]["low"] == pytest.approx(0.2), "what both share cancels"
    at_end = dials.turned(runs, replace(experiment, of="end"))
    assert at_end["plain"]["1"]["mean"] == pytest.approx(0.6)
    axes = Figure().subplots()
    dials.draw(axes, at_end, replace(experiment, of="end"))
    before = next(line for line in axes.lines if line.get_label() == "before")
    assert before.get_ydata() == pytest.approx([0.4]), "a dotted line for what the base had"
    axes = Figure().subplots()
    dials.draw(axes, found, experiment)
    dots = [line for line in axes.lines if line.get_marker() == "."]
    assert [len(line.get_ydata()) for line in dots] == [3, 3], "each seed can be seen"
    assert axes.get_xlabel() == "updates" and axes.get_ylabel() == "change of pass@1"
    text = dials.dial_text(runs, experiment, summarise(runs, experiment))
    assert "| change of pass@1, by updates | 1 | 1, minus plain |" in text, "no 4: it has no runs"
    assert "| plain | 0.2 [-0.0484, 0.448] | – |" in text
    assert "| soft | 0.4 [0.152, 0.648] | +0.2 [+0.2, +0.2] |" in text


def test_strict_accuracy_is_drawn_beside_lenient_accuracy():
    experiment = experiment_of({**ENTRY, "shown": "eval/lenient/pass@1"})
    run = record("plain, 1", 0, 0.4, 0.5)
    graded = [{**row, "eval/lenient/pass@1": row["eval/pass@1"] + 0.3 * i}
              for i, row in enumerate(run.history)]  # fmt: skip
    run = replace(run, history=graded)
    found = dials.turned([run], experiment)
    assert found["plain"]["1"]["mean"] == pytest.approx(0.4)
    assert found["plain"]["1"]["strict"] == pytest.approx(0.1)
    axes = Figure().subplots()
    dials.draw(axes, found, experiment)
    assert axes.get_legend_handles_labels()[1] == ["plain, strict", "plain, lenient"]
    assert axes.get_ylabel() == "change of pass@1", "of both"


def test_a_dial_of_the_world_has_its_recipe_in_the_identity_and_others_have_none():
    tiny = PROFILES["tiny"]
    for name in (name for name in EXPERIMENTS if name.startswith(dials.PREFIX)):
        experiment = EXPERIMENTS[name]
        assert experiment.turned and len(dials.arms_of(experiment)) >= 2
        identities = [experiment.identity(tiny, arm) for arm in experiment.arms]
        worlds = [one.get("world") for one in identities]
        of_config = name in ("dial-updates", "dial-evaluator")
        assert not any(worlds) if of_config else all(worlds)
        assert len({str(one) for one in identities}) == len(identities), "each is another run"
    assert "world" not in EXPERIMENTS["basic"].identity(tiny, "plain")


def test_the_control_of_checks_tosses_a_coin_for_each_verdict():
    arms = EXPERIMENTS["dial-checks"].arms
    paid = [arms[f"{name}, 0"].batch_source(None).keywords for name in ("random", "self-verify")]
    assert [of["reward"] for of in paid] == [random_reward, None]
    with pytest.raises(KeyError, match="luck"):
        arm_of({"strategy": "mixed", "post_process": "post_process", "verdicts": "luck"})


def test_the_neighbours_control_pays_what_a_group_earns_to_others_of_it_and_in_turn_to_oneself():
    def digits(*, completions, trainer_state, **columns):
        return [None if text == "-" else float(text) for text in completions]

    paid, state = of_neighbour(digits, 4), SimpleNamespace(global_step=0)
    by_step = []
    for state.global_step in range(5):
        by_step.append(paid(completions=list("12-45678"), trainer_state=state))
    assert by_step[0] == by_step[4] == [1, 2, None, 4, 5, 6, 7, 8]
    assert by_step[1] == [4, 1, 2, None, 8, 5, 6, 7]
    with pytest.raises(ValueError, match="paid is 'neighbours': choose neighbour's"):
        arm_of({"rewards": "plain and random", "paid": "neighbours"})


def test_a_dial_without_runs_says_which_command_makes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(dials, "load_current", lambda *given: ([], []))
    with pytest.raises(
        ValueError, match="no run of 'dial-checks' is stored: `grpo-kit run dial-che"
    ):
        dials.dial("dial-checks")
