"""Load a policy: any transformers causal LM with its tokenizer, whole or with LoRA weights."""

import copy
import hashlib
import sys
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kit import smollm2


@dataclass
class Policy:
    """A causal LM and its tokenizer."""

    model: Any  # transformers.PreTrainedModel or peft.PeftModel
    tokenizer: Any
    bf16: bool = False  # products in bfloat16 on a CPU

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that ends a completion: the generation config's, the tokenizer's and the chat
        template's end of turn, which is neither of the others in Qwen2.5's base models."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = list(ids) if isinstance(ids, Sequence) else [ids]
        ids += [self.tokenizer.eos_token_id, self.end_of_turn]
        return sorted({token for token in ids if token is not None})

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the chat template puts after an answer; None without one."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "said"}]
        try:
            text = self._render(messages, tokenize=False)
        except ValueError:
            return None
        after = self.tokenizer(text.rpartition("said")[2], add_special_tokens=False)["input_ids"]
        return after[0] if after and after[0] in self.tokenizer.added_tokens_decoder else None

    @property
    def pad_token_id(self) -> int:
        """The padding id; an EOS where the tokenizer has none (masks never depend on it)."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_ids[0] if pad is None else pad

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion together, where the model has a limit."""
        return getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize

    @property
    def _template(self) -> str:
        return f"the chat template of {self.model.config._name_or_path or 'this policy'}"

    def _render(self, messages: list, **options) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except TemplateError as error:
            raise ValueError(f"{self._template} refuses these messages ({error}).") from error

    def encode(self, prompts: Sequence[list[dict]]) -> list[list[int]]:
        """Token ids of each prompt (messages), with the chat template's opening of an answer."""
        options = {"add_generation_prompt": True, "return_dict": False}
        return self._render(list(prompts), **options) if len(prompts) else []

    def check_template(self, messages: Sequence[dict]) -> None:
        """Raise ValueError where the chat template drops a message or does not open an answer."""
        opened = self._render(list(messages), tokenize=False, add_generation_prompt=True)
        for message in messages:
            if message["content"].strip() not in opened:
                problem = f"{self._template} leaves out the {message['role']} message"
                raise ValueError(f"{problem}: move its text to the user's, or set another one.")
        if opened == self._render(list(messages), tokenize=False):
            raise ValueError(f"{self._template} does not open an answer: set another one.")

    def decode(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """Text of each completion, special tokens left out."""
        return self.tokenizer.batch_decode(list(completion_ids), skip_special_tokens=True)

    def compute_in(self, bf16: bool | str) -> None:
        """Set the arithmetic on a CPU, see `GRPOConfig.bf16`."""
        on_cpu = self.device.type == "cpu"
        self.bf16 = on_cpu and faster_in_bfloat16() if bf16 == "auto" else bool(bf16)

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit type of products, see `half_of`; None on a CPU without `bf16`."""
        if self.device.type == "cuda":
            return half_of("cuda")
        return torch.bfloat16 if self.bf16 else None

    def autocast(self) -> AbstractContextManager:
        """Arithmetic in `half`."""
        return torch.autocast(self.device.type, self.half) if self.half else nullcontext()


@cache
def faster_in_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16 at least 1.5 times as fast: one product, timed."""
    wide = torch.ones(512, 512)
    seconds = [
        min(timeit.repeat(lambda m=m: m @ m, number=1, repeat=5)) for m in (wide, wide.bfloat16())
    ]
    return seconds[0] > 1.5 * seconds[1]


def half_of(device: str) -> torch.dtype:
    """The 16-bit type of a device: bfloat16 but for GPUs that only emulate it, slowly."""
    if device.startswith("cuda") and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def load_policy(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    adapter: str | Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    lora_rank: int = 0,
) -> Policy:
    """Load a policy from a local folder or the Hub; weights are safetensors only.

    "smollm2" is SmolLM2-135M-Instruct from its package, see `smollm2`.

    Args:
        revision: commit on the Hub; ignored for a folder.
        adapter: folder with LoRA weights of a warm-up, which are merged into the model's.
        dtype: of the weights, "float32" or "bfloat16", or "half", the device's 16-bit type. Train
            whole models in float32 (small updates vanish in 16 bits), LoRA bases in 16.
        lora_rank: rank of LoRA weights on all linear layers; 0 trains the model itself.

    RuntimeError for no such device or model, ValueError for a tokenizer, template or adapter that
    does not fit.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        remedy = "take a machine with one, or a CPU: GRPO_KIT_DEVICE=cpu or the profile 'tiny'."
        problem = f"torch sees no device {device!r} here to run {name_or_path} on"
        raise RuntimeError(f"{problem}: {remedy}") from error
    dtype = half_of(device) if dtype == "half" else getattr(torch, dtype)
    if name_or_path == smollm2.NAME:
        name_or_path = smollm2.converted()
    elif name_or_path == smollm2.ON_HUB and revision is None:
        revision = smollm2.REVISION
    model, tokenizer = _pretrained(name_or_path, revision, dtype)
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {name_or_path} has no chat template: set one, save it.")
    rows, ids = model.get_input_embeddings().num_embeddings, len(tokenizer)
    if ids > rows:
        problem = f"the tokenizer of {name_or_path} has {ids} tokens and the model {rows}"
        raise ValueError(f"{problem}: they are of different revisions; fetch both of one commit.")
    if adapter:
        model = _merged(model, adapter)
    if lora_rank:
        model = _with_lora(model, lora_rank)
    return Policy(model.to(device), tokenizer)


def _pretrained(name_or_path: str | Path, revision, dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a folder or a Hub name, as they were saved."""
    is_folder = Path(name_or_path).is_dir()
    if is_folder and not Path(name_or_path, "config.json").is_file():
        remedy = "give a folder of save_pretrained, such as runs/first/policy."
        raise RuntimeError(f"{name_or_path} holds no model, it has no config.json: {remedy}")
    options = {"trust_remote_code": False}  # else transformers asks, and waits for an answer
    options |= {} if is_folder else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
        options |= {"dtype": dtype, "use_safetensors": True}
        return AutoModelForCausalLM.from_pretrained(name_or_path, **options), tokenizer
    except (OSError, SafetensorError) as error:
        reason = "it is no local folder and the Hub cannot be reached (or lacks it); give a folder "
        reason += "of save_pretrained, or fill the cache online and set HF_HUB_OFFLINE=1."
        if is_folder or isinstance(error, SafetensorError):
            reason = f"{error} (weights are taken as safetensors only): fetch it again."
        raise RuntimeError(f"cannot load {name_or_path}: {reason}") from error


def _merged(model: Any, adapter: str | Path) -> Any:
    """The model with an adapter's LoRA weights added to its own."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings():  # peft reads a property that transformers renames
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        return merged.requires_grad_(True)
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        problem = f"the adapter in {adapter} cannot be added to this model"
        raise ValueError(f"{problem} ({str(error).splitlines()[0]:.200}).") from error


def _with_lora(model: Any, rank: int) -> Any:
    """The model with a new adapter, the same each time, so that runs can be compared."""
    from peft import LoraConfig, get_peft_model

    layers = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, **layers))


def save_policy(policy: Policy, folder: str | Path) -> Path:
    """Save model (LoRA weights merged into a copy) and tokenizer for others; returns the folder."""
    model, folder = policy.model, Path(folder)
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, and afterwards in the mode that it had."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def unwrapped(model: Any) -> Any:
    """transformers' own model, without peft's around it; LoRA weights stay in its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def frozen_copy(policy: Policy) -> Policy:
    """An independent copy that no gradient reaches: a reference, an evaluator, a judge."""
    model = copy.deepcopy(policy.model).eval().requires_grad_(False)
    return Policy(model, policy.tokenizer, policy.bf16)


def weights_hash(parameters: Iterable[torch.Tensor], samples: int) -> str:
    """12 hex digits that tell models apart, by about `samples` values of each parameter."""
    digest = hashlib.sha256()
    for parameter in parameters:
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // samples)]
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def reference_of(policy: Policy) -> tuple[Any, Callable[[], AbstractContextManager]]:
    """The model of a KL term, the policy as it is now, and the context in which it is one.

    With LoRA it is the policy's own model with the adapter switched off, else a frozen copy.
    """
    if hasattr(policy.model, "disable_adapter"):
        return policy.model, policy.model.disable_adapter
    return frozen_copy(policy).model, nullcontext
