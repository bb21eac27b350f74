"""Files from strangers: a model folder or a list of claims runs nothing and says what is wrong."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from grpo_kit.lab.claims import load_claims
from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir

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
        (
            b"- !!python/object/apply:os.system ['touch MARK']\n",
            "cannot be read as YAML: could not",
        ),
        (f"- id: &a0 [ha, ha]\n{LAUGHS}".encode(), "claim 'number 12' in .*: id: Input should be"),
        (b"[" * 5000, "cannot be read as YAML: maximum recursion"),
        (b"\xff\xfe", "cannot be read as YAML: 'utf-8' codec"),
        (b"- &a [*a]\n", "claim 'number 1' in"),
    ],
    ids=["tag", "laughs", "deep", "bytes", "itself"],
)
def test_a_list_of_claims_runs_nothing_and_does_not_grow(tmp_path, monkeypatch, text, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "claims.yaml").write_bytes(text)
    claims, problems = load_claims(tmp_path / "claims.yaml")
    assert not claims and sum(map(len, problems)) < 5000
    assert re.search(sentence, problems[-1])
    assert not (tmp_path / "MARK").exists()
