"""Claims: read with their mistakes named, judged together, and shown with what was measured."""

import json

import pytest

from grpo_kit.course.plots import forest
from grpo_kit.lab import grid
from grpo_kit.lab.claims import (
    Claim,
    forest_rows,
    judge_claims,
    load_claims,
    planned,
    reported_claims,
)
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.profiles import PROFILES

RISES = {"id": "more", "statement": "It helps.", "source": "a paper", "experiment": "diversity",
         "arm": "diversity", "against": "plain", "metric": "eval/pass@1",
         "expects": "rises"}  # fmt: skip
PLAIN = [0.5, 0.52, 0.48, 0.51, 0.49]
GAINS = [0.2, 0.21, 0.19, 0.22, 0.2]


def claim(**changes) -> Claim:
    return Claim(**{**RISES, **changes})


def verdict_of(one: Claim, records):
    judged, problems = judge_claims([one], records)
    assert problems == []
    return judged[0]


@pytest.fixture(scope="session")
def gained(five):
    """Records of five seeds in which `diversity` gains what is given over `plain`."""
    return lambda gains: five(PLAIN, [p + g for p, g in zip(PLAIN, gains, strict=True)])


@pytest.fixture(scope="session")
def up(gained):
    return gained(GAINS)


def test_the_shipped_claims_cover_all_five_methods_and_can_all_be_run():
    claims, problems = load_claims()
    assert problems == [] and sum(bool(one.printed) for one in claims) >= 12
    for seed in ("000", "001", "002", "003", "004"):
        of_seed = [one for one in claims if one.seed == seed]
        assert len(of_seed) >= 4 and "paper" in {one.profile for one in of_seed}, seed
    for one in claims:
        assert len(one.statement) > 20 and one.source and one.evidence, one.id
        EXPERIMENTS[one.experiment].setting(PROFILES[one.profile], one.arm)  # raises if it cannot


def test_a_claimed_number_is_the_gain_that_its_source_prints():
    """Or the end, where the source prints nothing else."""
    for one in load_claims()[0]:
        if isinstance(one.expects, dict):
            (numbers,) = one.printed.values()
            gain = numbers[-1] - (numbers[0] if len(numbers) > 1 else 0)
            assert one.expects["value"] == pytest.approx(gain / 100, abs=5e-4), one.id


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("experiment: dance", "there is no experiment 'dance': choose among basic"),
        ("arm: waltz", "no arm 'waltz': choose among plain"),
        ("profile: moon", "there is no profile 'moon'"),
        ("expects: higher", "a claim expects 'higher'; say rises"),
        ("colour: red", "colour: Extra inputs are not permitted"),
        ("delta: 0", "delta: Input should be greater than 0"),
        ("source:", "source: Input should be a valid string"),
        ("acts: {metric: kl, least: 0.1, arm: waltz}", "no arm 'waltz': choose among plain"),
        ("acts: {metric: kl}", "acts.least: Field required"),
        ("delta: 0.1", "it judges the same number as 'good': make one row of the two"),
    ],
)
def test_a_mistake_in_a_claim_is_named_and_the_others_are_read(line, sentence, tmp_path):
    key = line.split(":")[0]
    bad = "".join(f"  {k}: {v}\n" for k, v in RISES.items() if k not in ("id", key))
    good = "".join(f"  {k}: {v}\n" for k, v in RISES.items() if k != "id")
    path = tmp_path / "claims.yaml"
    path.write_text(f"- id: good\n{good}- id: bad\n{bad}  {line}\n- id: good\n{good}")
    claims, problems = load_claims(path)
    assert [one.id for one in claims] == ["good"] and len(problems) == 2
    assert problems[0].startswith("claim 'bad' in claims.yaml: ") and sentence in problems[0]
    assert "another claim of this id" in problems[1]


def test_a_claim_is_judged_by_its_differences_seed_by_seed(up, gained, five):
    down = gained([-gain for gain in GAINS])
    mixed = five(PLAIN, [0.7, 0.3, 0.6, 0.4, 0.5])
    runs = {"reproduced": up, "contradicted": down, "inconclusive": mixed}
    for verdict, records in runs.items():
        assert verdict_of(claim(), records).verdict == verdict
    assert verdict_of(claim(delta=0.5), up).verdict == "no effect"
    assert verdict_of(claim(), up).here == "+0.204 [+0.19, +0.218]"
    few = verdict_of(claim(), [record for record in up if record.seed < 4])
    assert few.judgement.n == 4


def test_claims_of_an_experiment_are_judged_together_and_those_of_others_apart(gained):
    """What alone is clear enough is not among forty claims of chance."""
    weak = gained([0.1, 0.02, 0.12, 0.04, 0.08])
    assert verdict_of(claim(), weak).verdict == "reproduced"
    many = [claim(id=f"claim {i}") for i in range(40)]
    judged, _ = judge_claims(many, weak)
    assert {one.verdict for one in judged} == {"inconclusive"}
    untried = [claim(id=f"claim {i}", arm="only correct") for i in range(40)]
    judged, _ = judge_claims([claim(), *untried], weak)
    assert judged[0].verdict == "inconclusive", "its family is what was written, run or not"
    others = [claim(id=f"claim {i}", experiment="judge", arm="judge added") for i in range(40)]
    judged, _ = judge_claims([claim(), *others], weak)
    assert judged[0].verdict == "reproduced"


def test_the_arms_whose_runs_test_claims_come_in_order_with_the_seeds_that_decide():
    arms = ["trajectory", "judged outcome", "offline traces"]
    assert planned("flow", "tiny") == dict.fromkeys(arms, [*range(100, 110)])
    of = planned("verification", "tiny")
    assert of["self-verify"] == [*range(100, 115), *range(200, 220)]
    assert of["mixed"] == [*range(100, 115)]
    assert planned("flow", "paper") == {"trajectory": [*range(5)]}
    with pytest.raises(ValueError, match="no claim is tested by runs of 'variants' on profile 't"):
        planned("variants", "tiny")


def test_only_the_seeds_that_were_chosen_before_decide_and_only_all_of_them(make_record):
    """Seeds 0 to 4 say the contrary, but they had been looked at when the claim was written."""

    def runs(seeds, gain):
        ends = {"plain": 0.5, "diversity": 0.5 + gain}
        return [make_record(arm, s, e + s % 3 / 100) for arm, e in ends.items() for s in seeds]

    one, old = claim(n=6), runs(range(5), -0.3)
    few, all_ = runs(range(100, 105), 0.2), runs(range(100, 107), 0.2)
    partial = verdict_of(one, old + few)
    assert partial.verdict_text == "**not run here**: 5 of 6 planned seeds have run"
    assert partial.judgement is None and partial.here == f"`{one.command}`"
    whole = verdict_of(one, old + all_)
    assert (whole.verdict, whole.judgement.n) == ("reproduced", 6)
    assert "--seeds 100-105 " in one.command
    assert claim(n=6, first=200).seeds == range(200, 206) and claim(profile="paper").seeds is None
    assert verdict_of(claim(n=6, first=101), all_).judgement.n == 6


HELD = {"metric": "entropy", "least": 0.1}


def test_what_never_acted_or_cannot_rise_is_not_tested(make_record, up):
    """Whatever the numbers say: the reason stands beside the verdict."""

    def runs(arm, end, **changes):
        return [make_record(arm, seed, end + seed / 1000, **changes) for seed in range(5)]

    def reason(one, records):
        found = verdict_of(one, records)
        assert (found.verdict, found.verdict_text) == ("not tested", "**not tested**")
        assert not found.readings and not found.at_edge
        return found.judgement.reason

    same = "'diversity' and 'plain' made the same runs"
    assert reason(claim(), runs("plain", 0.5) + runs("diversity", 0.5)) == same
    assert reason(claim(expects="stays"), runs("plain", 0.5) + runs("diversity", 0.5)) == same
    top = runs("plain", 0.98) + runs("diversity", 0.99)
    assert reason(claim(), top) == "'plain' is at 0.982: there is no room to rise"
    assert verdict_of(claim(expects="falls"), top).verdict == "no effect"
    sunk = runs("plain", 0.98) + runs("diversity", 0.7)
    assert verdict_of(claim(), sunk).verdict == "contradicted", "down there is room"
    assert verdict_of(claim(acts=HELD), up).verdict == "reproduced", "mean of 0.4 and 0.2"
    idle = claim(acts=HELD | {"least": 0.31, "arm": "plain"})
    assert reason(idle, up) == "entropy of 'plain' is 0.3, below 0.31"
    never = claim(acts=HELD | {"metric": "meta/mass"})
    assert reason(never, up) == "meta/mass of 'diversity' is 0, below 0.1"


def test_what_was_not_run_says_how_to_run_it_and_another_profile_is_judged_apart(up, five):
    real = claim(id="real", profile="paper")
    (here, there), problems = judge_claims([claim(), real], up)
    assert there.verdict == "not run here" and there.judgement is None and problems == []
    command = 'grpo-kit run diversity --profile paper --seeds 0-4 --arm "plain" --arm "diversity"'
    assert there.here == f"`{command}`"
    runs = five([0.5] * 5, [0.5 + gain for gain in GAINS], profile="paper")
    (here, there), _ = judge_claims([claim(), real], [*up, *runs])
    assert (here.verdict, there.verdict) == ("reproduced", "reproduced")


def test_a_claim_is_drawn_around_what_it_claims_in_units_of_what_matters(up):
    claims = [claim(delta=0.1), claim(id="there", expects={"value": 0.2, "within": 0.05})]
    judged, _ = judge_claims([*claims, claim(id="real", profile="paper")], up)
    (first, second) = forest_rows(judged)
    assert first[:3] == ("more", "rises", "reproduced") and first[4] == 0.1
    assert first[3]["mean"] == pytest.approx(0.204)
    assert second[1] == "0.2 ± 0.05" and second[4] == 0.05
    assert second[3]["mean"] == pytest.approx(0.004)
    assert forest(forest_rows(judged)).axes[0].get_yticklabels()[0].get_text() == "there"
    ((told, *same),) = forest_rows(judged, "there")
    assert same == list(second[1:]) and told == judged[1].claim.statement
    judged, _ = judge_claims([claim(id="there", seed="RLOO"), claim(id="own", seed="002")], up)
    named, told = (row[0] for row in forest_rows(judged, "there", "own"))
    assert named.startswith("RLOO: ") and not told.startswith("002"), "a number names no method"


def test_every_shipped_claim_of_the_tiny_profile_has_its_seeds():
    judged, problems = reported_claims()
    profiles = {"tiny", "smol", "paper", "colab"}
    assert problems == [] and {one.claim.profile for one in judged} == profiles
    for one in judged:
        planned = one.claim.profile in ("tiny", "smol")
        assert bool(one.claim.seeds) == planned, one.claim.id
        ended = one.judgement and one.judgement.n == one.claim.n
        assert not planned or ended or one.verdict in ("not run here", "inconclusive", "not tested")


def test_runs_of_another_config_base_or_arm_are_left_out_with_a_sentence(up, make_record, tmp_path):
    for record in up:
        record.write(tmp_path)
    assert load_current(tmp_path)[1] == [] and len(load_current(tmp_path)[0]) == 10
    today = make_record("plain").config
    for seed, changes in enumerate(({"base": "0" * 16}, {"max_steps": 3}, {"options": {}})):
        make_record("plain", seed, config=today | changes).write(tmp_path)
    without = {key: value for key, value in today.items() if key != "use_bias_correction_kl"}
    make_record("plain", 3, config=without).write(tmp_path)  # at its default it has no effect
    records, problems = load_current(tmp_path)
    assert sorted(r.seed for r in records if r.arm == "plain") == [3, 4]
    assert len(problems) == 3 and all("`grpo-kit run diversity" in text for text in problems)
    assert "base '0000000000000000' there" in problems[0] and "max_steps 3 there" in problems[1]


def of_the_profiles_policy(name):
    return not any(arm.profile for arm in EXPERIMENTS[name].arms.values())


@pytest.mark.parametrize("name", filter(of_the_profiles_policy, EXPERIMENTS))
def test_no_two_arms_of_an_experiment_are_the_same_run_and_the_base_is_in_it(name, monkeypatch):
    experiment, profile = EXPERIMENTS[name], PROFILES["tiny"]
    arms = {arm: experiment.identity(profile, arm) for arm in experiment.arms}
    assert len({json.dumps(one, sort_keys=True) for one in arms.values()}) == len(arms)
    for one in arms.values():
        assert one["base"] and one["data"] and one["options"] and "save_steps" not in one
        assert one["task"] == ("tool_questions" if name == "flow" else "word_problems")
    monkeypatch.setattr(grid, "shipped_files", lambda folder: "another")
    for arm, before in arms.items():
        assert experiment.identity(profile, arm) != before
