"""Load a policy: any transformers causal LM with its tokenizer, whole or with LoRA weights.

`Policy` is what the rest of the kit passes around. Nothing here knows rewards or losses.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file


@dataclass
class Policy:
    """A causal LM and its tokenizer."""

    model: Any  # transformers.PreTrainedModel or peft.PeftModel
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a completion.

        Those of the generation config, the tokenizer's, and the token by which the chat template
        ends a turn: that of Qwen2.5's base models is neither of the others.
        """
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = [] if ids is None else list(ids) if isinstance(ids, Sequence) else [ids]
        ids += [self.tokenizer.eos_token_id, self._end_of_turn]
        return sorted({token for token in ids if token is not None})

    @cached_property
    def _end_of_turn(self) -> int | None:
        """The special token that the chat template puts after an answer; None without one."""
        said = "said"
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, ValueError):
            return None
        after = self.tokenizer(text.rpartition(said)[2], add_special_tokens=False)["input_ids"]
        return after[0] if after and after[0] in self.tokenizer.added_tokens_decoder else None

    @property
    def pad_token_id(self) -> int:
        """The padding id; an EOS where the tokenizer has none (masks never depend on it)."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_ids[0] if pad is None else pad

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may have together, where the model has a limit."""
        return getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize

    def encode(self, prompts: Sequence[list[dict]]) -> list[list[int]]:
        """Token ids of each prompt (messages), with the chat template's opening of an answer.

        Raises ValueError where the template refuses the messages.
        """
        if not len(prompts):
            return []
        try:
            return self.tokenizer.apply_chat_template(
                list(prompts), add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"{self._template} refuses these messages ({error}).") from error

    @property
    def _template(self) -> str:
        return f"the chat template of {self.model.config._name_or_path or 'this policy'}"

    def check_template(self, messages: Sequence[dict]) -> None:
        """Raise ValueError where the chat template leaves out what a prompt of the task says.

        All of its messages have to be in the text, and after them the opening of an answer.
        """
        try:
            opened, closed = (
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add
                )
                for add in (True, False)
            )
        except TemplateError as error:
            raise ValueError(f"{self._template} refuses these messages ({error}).") from error
        for message in messages:
            if message["content"].strip() not in opened:
                raise ValueError(
                    f"{self._template} leaves out the {message['role']} message, which the task "
                    "needs: put its text into the user message, or set another chat template."
                )
        if opened == closed:
            raise ValueError(
                f"{self._template} does not open an answer (add_generation_prompt changes "
                "nothing), so that the policy would not know whose turn it is: set another."
            )

    def decode(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """Text of each completion, special tokens left out."""
        return self.tokenizer.batch_decode(list(completion_ids), skip_special_tokens=True)

    @property
    def half(self) -> torch.dtype | None:
        """What arithmetic is done in on a GPU, see `half_of`; None on a CPU: as the weights are."""
        return half_of("cuda") if self.device.type == "cuda" else None

    def autocast(self):
        """Arithmetic in `half`."""
        if self.half is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.half)


def half_of(device: str) -> torch.dtype:
    """The 16-bit type of a device: bfloat16 but for GPUs that have it only emulated, and slow."""
    if device.startswith("cuda") and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def load_policy(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    lora_rank: int = 0,
    trust_remote_code: bool = False,
) -> Policy:
    """Load a policy from a local folder or the Hub; weights are safetensors only.

    Args:
        name_or_path: folder or Hub name.
        revision: commit on the Hub; ignored for a folder.
        device: "cpu" or "cuda".
        dtype: of the weights: "float32", "bfloat16", or "half", the device's 16-bit type. Train
            whole models in float32 (small updates vanish in 16 bits; arithmetic on CUDA is 16-bit
            anyway), LoRA bases in 16.
        lora_rank: rank of LoRA weights on all linear layers; 0 trains the model itself.
        trust_remote_code: run code that comes with the model; off unless you switch it on.

    Raises:
        RuntimeError: no CUDA where it is asked for, or the model can be had neither locally nor
            from the Hub.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(
            f"{name_or_path} is to run on {device}, but torch sees no CUDA GPU here: take a "
            "machine with one, or the profile 'tiny', which runs on a CPU."
        )
    options = {"trust_remote_code": trust_remote_code}
    of_hub = not Path(name_or_path).is_dir()
    if of_hub:
        options["revision"] = revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {name_or_path} has no chat template; set "
                "tokenizer.chat_template, prompts here are lists of messages."
            )
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            dtype=half_of(device) if dtype == "half" else getattr(torch, dtype),
            use_safetensors=True,
            **options,
        )
        if of_hub and revision:  # whoever loads it again, vLLM say, takes the same commit
            files = cached_file(name_or_path, "config.json", revision=revision)
            model.config._name_or_path = str(Path(files).parent)
    except SafetensorError as error:
        raise RuntimeError(
            f"the weights of {name_or_path} cannot be read ({error}): the download was probably "
            "interrupted; delete that file and fetch it again."
        ) from error
    except OSError as error:
        if Path(name_or_path).is_dir():
            raise RuntimeError(
                f"cannot load {name_or_path}: {error} (weights are taken as safetensors only)"
            ) from error
        raise RuntimeError(
            f"cannot load {name_or_path}: it is no local folder and the Hub cannot be reached (or "
            "lacks it); give the path of a folder made by save_pretrained, or fill the cache on a "
            "machine with network and set HF_HUB_OFFLINE=1."
        ) from error
    rows, ids = model.get_input_embeddings().num_embeddings, len(tokenizer)
    if ids > rows:
        raise ValueError(
            f"the tokenizer of {name_or_path} has {ids} tokens and the model {rows}: they are of "
            "different revisions or models; fetch both of one commit."
        )
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(
            r=lora_rank,
            lora_alpha=2 * lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():  # the same random adapter each time: runs can be compared
            torch.manual_seed(0)
            model = get_peft_model(model, adapter)
    return Policy(model.to(device), tokenizer)


def save_policy(policy: Policy, folder: str | Path) -> Path:
    """Save model and tokenizer as `load_policy`, transformers and vLLM take them; the folder.

    LoRA weights are merged into a copy of the model; the policy itself stays as it is.
    """
    model, folder = policy.model, Path(folder)
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def frozen_copy(policy: Policy) -> Policy:
    """An independent copy that no gradient reaches: a reference, an evaluator, a judge."""
    model = copy.deepcopy(policy.model).eval().requires_grad_(False)
    return Policy(model, policy.tokenizer)


def weights_hash(parameters: Iterable[torch.Tensor], samples: int) -> str:
    """12 hex digits that tell models apart, by about `samples` values of each parameter."""
    digest = hashlib.sha256()
    for parameter in parameters:
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // samples)]
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def reference_of(policy: Policy) -> Callable[[], AbstractContextManager]:
    """The model that a KL term holds the policy to, for use as `with reference() as model`.

    With LoRA the base under the adapter, which is switched off meanwhile and costs no memory (TRL
    keeps a copy of the adapter, which is the same for one that is new); otherwise a frozen copy of
    the policy as it is now.
    """
    if hasattr(policy.model, "disable_adapter"):

        @contextmanager
        def without_adapter():
            with policy.model.disable_adapter():
                yield policy.model

        return without_adapter
    model = frozen_copy(policy).model
    return lambda: nullcontext(model)
