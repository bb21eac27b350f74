"""The doctor: healthy runs are called healthy, each illness is told from its log."""

import csv
import json
import math
from pathlib import Path

import pytest
from toy import TASK, configure
from typer.testing import CliRunner

from grpo_kit import trl_bridge
from grpo_kit.cli import app
from grpo_kit.course.doctor import CHECKS, diagnose, is_healthy, read_log
from grpo_kit.lab.records import load
from grpo_kit.training import train

COLLAPSE = {  # arms whose reward rose as held-out accuracy fell: notebooks 03, 05 and 06 tell
    "judge only", "judge x 8", "two judges", "our defaults", "paper", "P(Yes) and format",
    "P(Yes) alone", "ensemble", "live evaluator", "random", "random and format",
    "random, our defaults", "random and format, our defaults", "format alone", "truth 1 %",
    "truth 10 %", "truth 10 %, without the std", "P(Yes), no labels", "P(Yes)",
    "majority", "self-certainty", "likelihood", "judged outcome", "correct alone",
    "short x 0.5", "short x 1", "short x 1.5", "short x 2", "neighbour and format",
    "plain, 0.2", "plain, 0.35", "plain, 0.5", "plain, 0.7", "neighbour, 0.5",  # of the dials
    "judge only, 0", "judge only, 0.3", "judge only, 0.6", "judge only, 0.9",
    "P(Yes) alone, 1e-4", "P(Yes) alone, 2e-4", "P(Yes) alone, 4e-4",
    "random, 2e-4", "random, 4e-4", "neighbour and format, our defaults",
    "random, 0", "random, 0.02", "random, 0.1", "random, 0.37", "random, 0.7",
}  # fmt: skip


def healthy(steps=40):
    """A run that learns, as TRL logs it: its loss is 0 all along."""
    return [
        {
            "step": i, "loss": 0.0, "reward": 0.3 + 0.5 * i / steps, "reward_std": 0.4,
            "frac_reward_zero_std": 0.1 + 0.4 * i / steps, "grad_norm": 0.5, "entropy": 0.3,
            "learning_rate": 1e-5, "completions/mean_length": 50.0 + 5 * (i % 3), "kl": 0.02,
            "frac_unscored": 0,
            "completions/clipped_ratio": 0.05, "rewards/accuracy_reward/mean": 0.4,
            "sampling/sampling_logp_difference/mean": 0.02,
            **({"eval/pass@1": 0.3 + 0.3 * i / steps} if i % 10 == 0 else {}),
        }
        for i in range(steps + 1)
    ]  # fmt: skip


def late(change):
    """`change` (a row, its place from 0 to 1) made to the second half of a healthy run."""
    rows = healthy()
    for i, row in enumerate(rows):
        if i > 20:
            row |= change(row, i / 40)
    return rows


def always(**values):
    return [row | values for row in healthy()]


SICK = {
    "no-spread": always(frac_reward_zero_std=1.0, reward=0.0),
    "flat-reward": always(reward=0.0),
    "reward-without-held-out": late(
        lambda row, x: {"eval/pass@1": 0.5 - 0.4 * x} if "eval/pass@1" in row else {}
    ),
    "form-lost": [
        row | ({"eval/lenient/pass@1": 0.6} if "eval/pass@1" in row else {})
        for row in late(
            lambda row, x: {"eval/pass@1": 0.5 - 0.4 * x} if row["step"] % 10 == 0 else {}
        )
    ],
    "clipped": always(**{"completions/clipped_ratio": 0.92}),
    "sampler-mismatch": always(**{"sampling/sampling_logp_difference/mean": 0.8}),
    "kl-explosion": late(lambda row, x: {"kl": 40 * x**4}),
    "entropy-collapse": late(lambda row, x: {"entropy": 0.3 * (1 - x) ** 4}),
    "entropy-explosion": late(lambda row, x: {"entropy": 8 * x}),
    "not-finite": late(lambda row, x: {"loss": math.nan}),
    "length-collapse": late(lambda row, x: {"completions/mean_length": 1.0}),
    "vanishing-gradient": always(grad_norm=0.0),
    "no-learning-rate": always(learning_rate=0.0),
    "unscored": always(frac_unscored=0.7),
}


def test_answers_that_are_wrong_by_both_gradings_have_not_just_lost_their_form():
    rows = [dict(row) for row in SICK["reward-without-held-out"]]
    for row in rows:
        if "eval/pass@1" in row:
            row["eval/lenient/pass@1"] = row["eval/pass@1"] + 0.05
    assert [one.id for one in diagnose(rows)] == ["reward-without-held-out"]


@pytest.mark.parametrize("name", [check[0] for check in CHECKS])
def test_each_check_finds_its_illness_and_nothing_else(name):
    found = {finding.id: finding for finding in diagnose(SICK[name])}
    assert found[name].severity == "sick"
    first, last = found[name].steps
    assert 0 <= first <= last <= 40
    assert any(character.isdigit() for character in found[name].evidence) and found[name].advice
    beside = {"flat-reward"} if name == "no-spread" else set()
    assert found.keys() - beside == {name}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_reward_that_is_no_number_is_sick(value):
    assert [one.id for one in diagnose(always(reward=value))] == ["not-finite"]


def test_a_loss_of_0_and_a_solved_task_are_healthy():
    assert diagnose(healthy()) == []
    solved = late(lambda row, x: {"frac_reward_zero_std": 1.0, "grad_norm": 0.0})
    (note,) = diagnose(solved)
    assert (note.id, note.severity) == ("no-spread", "note") and is_healthy([note])


def test_groups_without_spread_are_no_fault_where_the_baseline_is_the_batch():
    """REINFORCE++ learns from groups that agree: its gradient says so, if no KL makes it."""
    rows = always(frac_reward_zero_std=1.0)
    assert {one.id for one in diagnose(rows)} == {"no-spread"}
    for row in rows:
        del row["kl"]
    assert diagnose(rows) == []


def test_no_stored_run_is_called_sick_but_those_that_collapsed():
    records, problems = load()
    assert len(records) > 100 and not problems
    called = [(r, [f for f in diagnose(r.history) if f.severity == "sick"]) for r in records]
    for record, sick in called:
        assert not sick or record.arm in COLLAPSE, (record.arm, record.seed, sick)
    collapsed = [sick for record, sick in called if record.arm == "judge only"
                 and record.profile == "tiny"]  # fmt: skip
    assert all([one.id for one in sick] == ["reward-without-held-out"] for sick in collapsed)
    assert len(collapsed) >= 5


def odd(completion_ids, **_):
    return [float(len(ids) % 2) for ids in completion_ids]


def test_the_log_of_a_real_run_is_read_of_the_kit_and_of_trl(policy, tmp_path):
    config = configure(max_steps=4, eval_prompts=0, learning_rate=0.0)
    train(policy, TASK, [odd], config, output_dir=tmp_path / "kit", seed=0)
    trl_bridge.train(policy, TASK, [odd], config, output_dir=tmp_path / "trl", seed=0)
    trls_own = trl_bridge.last_checkpoint(tmp_path / "trl") / "trainer_state.json"
    for log in (tmp_path / "kit", trls_own):
        assert "no-learning-rate" in {one.id for one in diagnose(read_log(log))}


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_the_command_reads_a_table_of_older_names(tmp_path):
    rows = [
        {"global_step": i, "train/reward": 0.1 + i / 99, "completion_length": 90 - 2 * i, "on": "x"}
        for i in range(41)
    ]
    with open(tmp_path / "log.csv", "w", newline="", encoding="utf-8-sig") as file:  # as Excel does
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    done = doctor(tmp_path / "log.csv")
    assert done.exit_code == 1 and done.stdout.startswith("sick, by 41 logged steps")
    assert "sick: length-collapse (steps 0 to 40)" in done.stdout
    assert done.stdout.count("sick: ") == 1


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", "[" * 100_000, "no log that can be read"),
        ("a.csv", "a,b\n1,2\n", "has no metric of a GRPO run, such as reward"),
        ("folder", None, "holds neither history.jsonl nor trainer_state.json"),
    ],
)
def test_a_file_that_is_no_log_is_named(name, content, sentence, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    elif not path.suffix:
        path.mkdir()
    done = doctor(path)
    assert done.exit_code == 2 and sentence in done.stderr


def test_the_last_checkpoint_of_trl_is_read_and_a_cut_line_is_left_out(tmp_path):
    for step, reward in ((2, 0.1), (10, 0.2)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        log = {"log_history": [{"step": step, "reward": reward, "name": "x"}, {"step": step}]}
        Path(folder, "trainer_state.json").write_text(json.dumps(log))
    assert read_log(tmp_path)[0] == {"step": 10, "reward": 0.2}
    rows = '{"step": 1, "reward": 1.0}\n{"step": Infinity, "reward": 2.0}'
    for cut in ("", '\n{"step": 2, "rew'):
        (tmp_path / "history.jsonl").write_text(rows + cut)
        assert read_log(tmp_path) == [{"step": 1, "reward": 1.0}, {"step": 1, "reward": 2.0}]
