"""Result files: what is written can be read back, and what is not what a run wrote is refused."""

import gzip
import json
import math
import subprocess

import pytest
import torch

from grpo_kit.lab import records
from grpo_kit.lab.records import find, fingerprint, gather, load, read


def test_a_record_is_read_back_as_it_was_written(make_record, tmp_path):
    record = make_record("truth 10 %", 3, 1 / 3, config={"beta": 0.1, "weights": (0, 1)})
    path = record.write(tmp_path)
    assert path == tmp_path / "tiny" / "diversity" / "truth-10" / "seed-3.json"
    there = read(path)
    assert there.evaluation["eval/pass@1"] == pytest.approx(1 / 3, abs=1e-6)
    assert there.config == {"beta": 0.1, "weights": [0, 1]} and there.arm == "truth 10 %"
    assert there.samples == record.samples
    assert there.change("eval/pass@1") == pytest.approx(1 / 3 - 0.25, abs=1e-6)
    for of in (there.end, there.change, there.late):
        assert of("kl") is None, "never logged"
    there.write(tmp_path)
    assert read(path) == there, "written again it is the same"
    assert list(path.parent.iterdir()) == [path], "nothing half-written stays"
    path = make_record(evaluation={"eval/pass@1": math.nan}).write(tmp_path)
    assert read(path).evaluation == {"eval/pass@1": None} and "NaN" not in path.read_text()


def test_the_end_is_what_was_measured_or_logged_last_and_late_the_mean_of_the_last_steps(
    make_record,
):
    history = [{"step": i, "entropy": float(i), "kl": i / 2} for i in range(100)]
    record = make_record(history=history)
    assert (record.end("entropy"), record.end("kl")) == (0.2, 49.5)
    assert record.late("entropy") == sum(range(80, 100)) / 20
    assert record.change("kl") == 49.5 and make_record(history=history[:1]).change("kl") is None
    short = make_record(history=history[:7])
    assert short.late("entropy") == (3 + 4 + 5 + 6) / 4, "of a short run its second half"


def test_the_shipped_files_are_written_again_byte_by_byte(tmp_path):
    stored, problems = load()
    assert len(stored) > 200 and problems == []
    for record in stored[::40]:
        record.write(tmp_path)
    for path in gather(tmp_path):
        whole = gzip.decompress((records.results_dir() / path.relative_to(tmp_path)).read_bytes())
        assert set(gzip.decompress(path.read_bytes()).splitlines()) <= set(whole.splitlines())


def test_finished_runs_are_gathered_and_a_run_made_anew_takes_its_lines_place(
    make_record, tmp_path
):
    made = [make_record(arm, seed) for arm in ("plain", "truth 10 %") for seed in (0, 1)]
    for record in made:
        record.write(tmp_path)
    before = load(tmp_path)
    (path,) = gather(tmp_path)
    assert path == tmp_path / "tiny" / "diversity.jsonl.gz"
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path], "and no folder"
    assert load(tmp_path) == before and gather(tmp_path) == []
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    assert [json.loads(line)["arm"] for line in lines] == ["plain"] * 2 + ["truth 10 %"] * 2
    make_record("plain", 1, accuracy=0.9).write(tmp_path)
    for there in (load(tmp_path), (gather(tmp_path), load(tmp_path))[1]):
        ends = {(r.arm, r.seed): r.evaluation["eval/pass@1"] for r in there[0]}
        assert len(ends) == 4 and ends["plain", 1] == 0.9 and ends["plain", 0] == 0.5
    assert find(tmp_path, "tiny", "diversity", "plain", 1).evaluation["eval/pass@1"] == 0.9
    assert find(tmp_path, "tiny", "diversity", "plain", 7) is None


@pytest.mark.parametrize(
    ("damage", "sentence", "left"),
    [
        (lambda data: data[:-30], "is no whole file of results", 0),
        (lambda data: b"text", "is no whole file of results", 0),
        (lambda data: gzip.compress(gzip.decompress(data)[:-60]), "line 2 of", 1),
        (lambda data: gzip.compress(gzip.decompress(data).replace(b"tiny", b"moon")), "line 1", 0),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named_the_others_are_read_and_nothing_is_gathered_over_it(
    damage, sentence, left, make_record, tmp_path
):
    for seed in (0, 1):
        make_record(seed=seed).write(tmp_path)
    (path,) = gather(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    there, problems = load(tmp_path)
    assert len(there) == left and sentence in problems[0] and "\n" not in problems[0]
    own = make_record(seed=2).write(tmp_path)
    damaged = path.read_bytes()
    assert gather(tmp_path) == [] and own.exists() and path.read_bytes() == damaged
    with pytest.raises(ValueError, match=sentence):
        find(tmp_path, "tiny", "diversity", "plain", 0)


def test_what_cannot_be_gathered_stays(make_record, tmp_path, monkeypatch):
    """A broken file beside a good line, a stray file, and a run that ends in the meantime."""
    make_record(seed=0).write(tmp_path)
    gather(tmp_path)
    broken = make_record(seed=0).write(tmp_path)
    broken.write_text(broken.read_text()[:300])
    (broken.parents[1] / ".DS_Store").write_text("")
    ended, write = make_record(seed=1).write(tmp_path), records.write_atomic

    def meanwhile(path, content):
        write(path, content)
        if path.suffix == ".gz":
            make_record(seed=1, accuracy=0.9).write(tmp_path)

    monkeypatch.setattr(records, "write_atomic", meanwhile)
    gather(tmp_path)
    assert broken.exists() and read(ended).evaluation["eval/pass@1"] == 0.9
    there, (problem,) = load(tmp_path)
    assert [one.evaluation["eval/pass@1"] for one in there] == [0.5, 0.9] and str(broken) in problem


def edit(change, sign=False):
    def damage(path):
        content = json.loads(path.read_text())
        change(content)
        if sign:
            del content["checksum"]
            content["checksum"] = fingerprint(content)
        path.write_text(json.dumps(content))

    return damage


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.write_text(path.read_text()[:-40]), "is no whole result file"),
        (lambda path: path.write_text("[" * 100_000), "is no whole result file"),
        (lambda path: path.write_bytes(b"\xff"), "is no whole result file"),
        (edit(lambda c: c.update(schema=99)), "schema: Input should be 1"),
        (edit(lambda c: c.pop("machine")), "machine: Field required"),
        (edit(lambda c: c["config"].update(max_steps=9)), "was edited after the run"),
        (edit(lambda c: c["history"].pop()), "was edited after the run"),
        (edit(lambda c: c["history"].clear(), sign=True), "has no history"),
    ],
)
def test_a_damaged_file_is_named_and_others_are_read(damage, sentence, make_record, tmp_path):
    bad = make_record(seed=0).write(tmp_path)
    make_record(seed=1).write(tmp_path)
    damage(bad)
    with pytest.raises(ValueError, match="seed-0.json") as caught:
        read(bad)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    there, problems = load(tmp_path)
    assert [record.seed for record in there] == [1] and problems == [str(caught.value)]


def test_a_file_in_anothers_place_is_named(make_record, tmp_path):
    path = make_record(seed=0).write(tmp_path)
    path.with_name("seed-07.json").write_text(path.read_text())
    there, (problem,) = load(tmp_path)
    assert len(there) == 1 and f"seed-07.json holds the run that belongs in {path}: mov" in problem


def test_only_what_is_asked_for_is_loaded(make_record, tmp_path):
    for profile, experiment in (("tiny", "judge"), ("tiny", "flow"), ("paper", "flow")):
        make_record(profile=profile, experiment=experiment).write(tmp_path)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench.json").write_text("{}")
    assert len(load(tmp_path)[0]) == 3 and load(tmp_path)[1] == []
    assert [r.profile for r in load(tmp_path, experiment="flow")[0]] == ["paper", "tiny"]
    assert len(load(tmp_path, "tiny", "flow")[0]) == 1


def test_a_record_says_where_it_was_made_also_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    here = records.where_it_ran()
    assert {"python", "torch", "transformers"} <= set(here["versions"])
    assert here["machine"]["processor"] and here["machine"]["threads"] >= 1
    assert len(here["finished"]) == 10 and here["commit"] == ""
    if not torch.cuda.is_available():  # loading the model says that the GPU is missing
        assert records.where_it_ran("cuda")["machine"]["accelerator"] == "none"


def test_a_commit_is_marked_where_code_or_base_were_changed(tmp_path):
    names = ("grpo_kit/lab/records.py", "grpo_kit/training.py", "data/tiny-base/model")
    files = [tmp_path / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")

    def git(*arguments):
        author = ["-c", "user.name=x", "-c", "user.email=x"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True)

    assert records.commit(tmp_path) == "", "no repository"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "zero")
    assert records.commit(tmp_path) == "", "a repository of something else"
    git("add", ".")
    git("commit", "-qm", "one")
    clean = records.commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "README.md").write_text("words decide nothing")
    assert records.commit(tmp_path) == clean
    for file in (*files[1:], tmp_path / "grpo_kit" / "new.py"):
        before = file.read_text() if file.exists() else None
        file.write_text("2")
        assert records.commit(tmp_path) == clean + "+", file
        file.write_text(before) if before else file.unlink()
