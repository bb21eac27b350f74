"""Files and texts from strangers: they run nothing, load nothing, and hide nothing."""

import json
import os
import pickle
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from grpo_kit.cli import app
from grpo_kit.course import doctor
from grpo_kit.course.viewer import group_html
from grpo_kit.lab.claims import load_claims
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.records import Record
from grpo_kit.lab.report import write_report
from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES

QUESTION = [{"role": "user", "content": "How many?"}]


class Deed:
    """Pickled, it touches a file wherever it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def pickled_weights(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Deed(mark)}))


def own_code(folder: Path, mark: Path) -> None:
    (folder / "deed.py").write_text(f"import os\nos.system('touch {mark}')\n")
    for name, classes in (
        ("config.json", {"AutoConfig": "deed.C", "AutoModelForCausalLM": "deed.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["deed.T", "deed.T"]}),
    ):
        config = json.loads((folder / name).read_text())
        config |= {"auto_map": classes, "model_type": "deed"}
        (folder / name).write_text(json.dumps(config))


def template_outside_its_sandbox(folder: Path, mark: Path) -> None:
    text = f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"
    (folder / "chat_template.jinja").write_text(text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (pickled_weights, "weights are taken as safetensors only"),
        (own_code, "contains custom code|trust_remote_code"),
        (template_outside_its_sandbox, "the chat template of .* refuses these messages"),
    ],
)
def test_a_model_folder_runs_nothing(tmp_path, change, sentence):
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(data_dir() / "tiny-base", folder)
    change(folder, mark)
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        load_policy(folder).encode([QUESTION])
    assert not mark.exists()


LAUGHS = "".join(f"- id: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"- !!python/object/apply:os.system ['touch MARK']\n", "read as YAML: could not"),
        (f"- id: &a0 [ha, ha]\n{LAUGHS}".encode(), "claim 'number 12' in .*: id: Input should be"),
        (b"[" * 1500, "cannot be read as YAML: maximum recursion"),
        (b"\xff\xfe", "cannot be read as YAML: 'utf-8' codec"),
        (b"- &a [*a]\n", "claim 'number 1' in"),
        (b"id: x", "no list"),
    ],
    ids=["tag", "laughs", "deep", "bytes", "itself", "no list"],
)
def test_a_list_of_claims_runs_nothing_and_does_not_grow(tmp_path, monkeypatch, text, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "claims.yaml").write_bytes(text)
    claims, problems = load_claims(tmp_path / "claims.yaml")
    assert not claims and sum(map(len, problems)) < 5000
    assert re.search(sentence, problems[-1])
    assert not (tmp_path / "MARK").exists()


DEED = "document.title = 'acted'"
HOSTILE = (
    f'</script><script>{DEED}</script><img src=http://192.0.2.1/x onerror="{DEED}">'
    f'<svg onload="{DEED}"></pre>\x1b[31m\x1b]0;title\x07\u202eabc\u2028'
)


def hostile_pages(tmp_path, answer: str = HOSTILE) -> dict[str, str]:
    """The text as an answer, a name, a question, a claim and a log, in each page that we make."""
    record = Record(
        experiment="basic", arm="plain", profile="tiny", seed=0, seconds=1.0, commit="",
        config=EXPERIMENTS["basic"].identity(PROFILES["tiny"], "plain"), evaluator=1,
        start={"batch_source": HOSTILE, "rewards": [HOSTILE]}, versions={"python": HOSTILE},
        machine={"processor": HOSTILE, "accelerator": "none", "threads": 1, "system": HOSTILE},
        finished=HOSTILE, evaluation={"eval/pass@1": 0.5},
        history=[{"step": i, "reward": 0.5, "eval/pass@1": 0.5, "num_generated_tokens": i,
                  "step_time": 1.0} for i in range(3)],
        samples=[{"prompt": answer, "completion": answer, "right": True}],
    )  # fmt: skip
    record.write(tmp_path / "results")
    claims = yaml.safe_load((data_dir() / "claims.yaml").read_text())
    claims[0] |= {"statement": HOSTILE, "source": HOSTILE}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(claims))
    report = write_report(tmp_path / "report", tmp_path / "results", tmp_path / "claims.yaml")
    as_html = MarkdownIt("commonmark").enable("table").render(report.read_text())  # as GitHub does
    return {
        "group": group_html(answer, [[answer], ["b"]], [1.0, 0.0], [1.0, -1.0]),
        "report": as_html,
    }


def test_a_hostile_text_stays_a_text_in_every_page(tmp_path):
    for name, page in hostile_pages(tmp_path).items():
        assert not {"\x1b", "\u202e"} & set(page), name
        tags, parser = [], HTMLParser()
        parser.handle_starttag = lambda *tag, tags=tags: tags.append(tag)
        parser.feed(page)
        assert tags and "script" not in dict(tags), name
        for key, value in (one for _, attributes in tags for one in attributes):
            assert not key.startswith("on") and "192.0.2.1" not in (value or ""), name


@pytest.mark.slow
def test_of_a_text_without_end_a_page_shows_the_beginning(tmp_path):
    """A line of 100 MB as question, answer, tool result and sample, and in the log of a run."""
    endless = "<b>" + "x" * 100_000_000
    for name, page in hostile_pages(tmp_path, endless).items():
        assert len(page) < 5_000_000, name
        if name != "report":  # which has no answers
            assert "99,980,003 more characters" in page, name
    log = tmp_path / "history.jsonl"
    log.write_text("".join(json.dumps({"step": i, "reward": 0.1}) + "\n" for i in range(30)))
    with log.open("a") as file:
        file.write(json.dumps({"step": 30, "reward": 0.1, "note": endless}) + "\n")
    rows = doctor.read_log(tmp_path)
    assert len(doctor.in_words(doctor.diagnose(rows), rows)) < 5_000_000


def test_a_sentence_on_the_terminal_carries_no_colour_or_title():
    done = CliRunner().invoke(app, ["train", "--data", "\x1b]0;title\x07\x1b[31m"])
    assert done.exit_code == 2 and "\\u001b]0;title\\u0007" in done.output
    assert "\x1b" not in done.output
