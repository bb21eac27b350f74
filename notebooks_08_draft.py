# %% md title
# # 08 · Scale out: the same rewards, other engines, real models
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/grpo-kit/grpo-kit/blob/main/notebooks/08_scale_out.ipynb)
#
# So far one process trained a model that fits anywhere. A real model wants a GPU, a larger one several, and engines that are made for that. **What you will do:** give
# the same policy, task, rewards and config to TRL's trainer, and see whether it learns the same; see what goes wrong when a group lies in two processes, and run two;
# count memory and time of a run before it is started; and find the command that trains, evaluates and serves a real model.
#
# **You need** two CPU cores with the default profile `tiny`: about two minutes. No GPU; what needs one is marked, with its command.
# %% pip
import sys

if "google.colab" in sys.modules:  # Colab's torch and numpy stay, if they are not too old
    %pip install -q "grpo-kit[trl] @ git+https://github.com/grpo-kit/grpo-kit"
# %% imports
import dataclasses
import json
import os
import platform
import subprocess
from pathlib import Path

import datasets
import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
import trl
from IPython.display import Markdown, display

from grpo_kit import check, plan, training, trl_bridge
from grpo_kit.config import PROFILES, GRPOConfig
from grpo_kit.plots import arm_bands
from grpo_kit.reproduction.summary import reported, summary_text
from grpo_kit.rewards import DiversityReward, accuracy_reward, format_reward

%matplotlib inline
datasets.disable_progress_bars()
transformers.utils.logging.disable_progress_bar()
print(f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}, "
      f"transformers {transformers.__version__}, trl {trl.__version__}")
# %% parameters @parameters
PROFILE = "tiny"  # smoke, tiny, colab or paper
SEED = 0
OUTPUT_DIR = "../runs/08_scale_out"
STEPS = 8  # of each engine's run
# %% settings
profile = PROFILES[PROFILE]
if profile.threads:
    torch.set_num_threads(profile.threads)
output_dir = Path(OUTPUT_DIR)
output_dir.mkdir(parents=True, exist_ok=True)
config = dataclasses.replace(profile.config, max_steps=min(STEPS, profile.config.max_steps),
                             eval_prompts=min(64, profile.config.eval_prompts), eval_steps=0)
rewards = [accuracy_reward, format_reward]
# %% md engine-text
# ## Step 1 · The same run, another engine
#
# Names here have been TRL's from the first notebook on. `trl_bridge.train` is called like `training.train`, and leaves the same files.
#
# **Predict:** same policy, same seed, same config. Will the two runs sample the same answers?
# %% engine-run @nbval-skip
runs = {}
for name, train in (("kit", training.train), ("TRL", trl_bridge.train)):
    runs[name] = train(profile.load_policy(), profile.load_task(), rewards, config,
                       output_dir=output_dir / name, seed=SEED)
# %% engine-table @nbval-skip
shown = ["reward", "eval/pass@1", "completions/mean_length", "entropy", "grad_norm", "step_time"]
pd.DataFrame({(name, when): {key: run.history[i].get(key, float("nan")) for key in shown}
              for name, run in runs.items() for when, i in (("first step", 1), ("last", -1))}).round(3)
# %% md engine-read
# They do not: each engine has its own random numbers and its own order of prompts. What can be equal is what is *computed* from the same tokens, and that is tested to 1e-5 (loss and
# gradient, `tests/test_trl_oracle.py`). What should be equal is what is *learnt*; that takes seeds:
# %% parity
engines = reported("engines")
display(arm_bands(engines["curves"]))
display(Markdown(summary_text(engines, ["eval/pass@1", "eval/greedy", "entropy", "eval/mean_length", "seconds"])))
# %% md fields-text
# Every field of our config has one of three fates under TRL:
# %% fields
# NBVAL_CHECK_OUTPUT
print(len(trl_bridge.SAME), "are called alike and mean the same:", ", ".join(trl_bridge.SAME[:6]), "…")
print(len(trl_bridge.OURS), "are translated:", ", ".join(trl_bridge.OURS))
print(len(trl_bridge.REFUSED), "are refused where they are used:")
for name, (without, why) in trl_bridge.REFUSED.items():
    print(f"  {name} (but {without}): {why}")
# %% md group-text
# ## Step 2 · A group in two processes
#
# With several processes each samples its share of the batch. 24 completions in groups of 8, dealt out to two processes: the first has groups 1 and the first half of 2. Rewards of
# single completions do not mind. The diversity reward compares a completion with the mean of *its group*.
#
# **Predict:** what does a process compute that takes its 12 completions for groups of 4, or of 6?
# %% group-toy
# NBVAL_CHECK_OUTPUT
generator = torch.Generator().manual_seed(1)
embeddings = torch.nn.functional.normalize(torch.randn(24, 3, generator=generator), dim=1)


def unlike(part, size):
    """1 - cosine with the mean of its group, for groups of `size`."""
    groups = part.view(-1, size, part.shape[-1])
    mean = torch.nn.functional.normalize(groups.mean(1, keepdim=True), dim=-1)
    return (1 - (groups * mean).sum(-1)).flatten()


whole = unlike(embeddings, 8)
split = torch.cat([unlike(part, 6) for part in embeddings.split(12)])  # two processes, 12 each
print("groups that come out right:", [bool(torch.allclose(a, b)) for a, b in zip(whole.split(8), split.split(8))])
print(f"largest difference of a reward: {(whole - split).abs().max():.2f}")
# %% md group-read
# Nothing fails; rewards are wrong. (The kit's reward refuses such a batch, since it looks at the prompts.) `trl_bridge.whole_groups` lets the first process compute them for all, where all are.
# Two processes, on this CPU:
# %% two @nbval-skip
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
           "-m", "grpo_kit.cli", "train", "--engine", "trl", "--variant", "diversity",
           "--profile", "smoke", "--output", str(output_dir / "two")]
if profile.device == "cpu":
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (output_dir / "two" / "history.jsonl").read_text().splitlines()]
    print(f"{len(rows) - 1} steps in two processes, diversity reward "
          f"{rows[-1]['rewards/diversity_reward/mean']:.3f} in the last")
# %% md plan-text
# ## Step 3 · Will it fit, how long will it take?
#
# A weight in float32 takes 4 bytes, its gradient 4, Adam's two moments 8. Then there is what the backward pass needs of every token, and the cache of what is being sampled. `plan.plan` counts all of it
# from the model's shape; the tests hold it against real models and against what autograd keeps.
#
# **Predict:** Qwen2.5-1.5B with 1.5 billion weights, all of them trained, completions of 1,024 tokens: does it fit on a GPU with 80 GB? What takes most?
# %% plan
# NBVAL_CHECK_OUTPUT
places = {
    "colab, one T4": ("colab", dict(gpu="T4")),
    "paper, one H100": ("paper", dict(gpu="H100")),
    "paper, one H200": ("paper", dict(gpu="H200")),
    "paper, 8 A100, sharded": ("paper", dict(gpu="A100-80", gpus=8, engine="trl", sharded=True)),
    "paper, 8 H100, vLLM": ("paper", dict(gpu="H100", gpus=8, engine="trl+vllm")),
}
plans = {label: plan.plan(PROFILES[name], **where) for label, (name, where) in places.items()}
table = pd.DataFrame({label: {**made.memory, "a GPU in all": made.total, "it has": made.gpu.memory}
                      for label, made in plans.items()}).fillna(0).round(1)
print(table.to_string())
# %% plan-figure
figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
left = pd.Series(0.0, index=list(plans))
for part in dict.fromkeys(part for made in plans.values() for part in made.memory):
    widths = pd.Series({label: made.memory.get(part, 0.0) for label, made in plans.items()})
    axes.barh(list(plans), widths, left=left, label=part)
    left += widths
for place, made in enumerate(plans.values()):
    axes.plot([made.gpu.memory] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
axes.invert_yaxis()
axes.set(xlabel="GiB of one GPU; the black line is what it has", title="What a run needs, by part")
axes.legend(fontsize=8, ncols=2)
plt.show()
# %% plan-time
pd.DataFrame({label: {"sampling, s a step": made.seconds["generation"], "update, s a step": made.seconds["update"],
                      "tokens a second": made.tokens_per_second, "hours": made.hours}
              for label, made in plans.items()}).T.round(1)
# %% md plan-read
# It does not fit on 80 GB as the profile has it: activations take most, and they go down with `per_device_train_batch_size`. Weights, gradients and moments are the same whatever the batch; they go down by
# spreading them over GPUs, or with LoRA. Sampling reads all weights for every token, however few rows there are, so it gets cheaper a token the more rows are sampled together.
#
# Times are the least that the hardware allows, divided by a guessed share of it (0.3) that is reached. `grpo-kit plan --help` has the knobs; where it says that a run does not fit, it says what to lower.
# %% md where-text
# ## Step 4 · What runs where
#
# | engine | from | what for | run by us? |
# |---|---|---|---|
# | the kit, `grpo-kit train` | a CPU, one GPU | learning, reading, changing the loop; small models | on a CPU, all of it |
# | TRL, `--engine trl` | one GPU | everything that TRL brings: logging, PEFT, quantisation | on a CPU |
# | TRL, several processes: `torchrun`, or `accelerate launch --config_file data/accelerate/ddp.yaml` | 2 GPUs | larger batches | two processes on a CPU |
# | TRL, sharded: `fsdp2.yaml`, `zero3.yaml` beside it | 2 GPUs | weights that one GPU cannot hold | no |
# | TRL + vLLM, `--vllm colocate` or `--vllm server` | 1 GPU, 2 for a server | long completions | no |
# | verl, SkyRL | 8 GPUs | Flow-GRPO with a memory written anew each turn (an episode is several rows: `flow.turn_rows`, `flow.episode_advantages`); models of 7 billion and more | no |
#
# Rewards are the same objects everywhere: `f(prompts, completions, completion_ids, **columns)`. Those that compare a group are made for several processes by `whole_groups`, those that ask a model for
# its own weights need them in one process (README, "The rewards under TRL").
#
# ## Step 5 · A real model
#
# ```bash
# grpo-kit plan --profile colab --gpu T4                       # does it fit?
# grpo-kit evaluate --profile colab                            # before: GSM8K's 1,319 test rows, strict and lenient
# grpo-kit train --profile colab --output runs/qwen            # LoRA on Qwen2.5-0.5B-Instruct, one 16 GB GPU
# grpo-kit evaluate --profile colab --policy runs/qwen/policy  # after, with merged weights
# transformers serve                                           # or vllm serve runs/qwen/policy
# ```
#
# The models come from the Hub at pinned revisions, once (`HF_HUB_OFFLINE=1` afterwards), or from a folder: `--policy FOLDER`, `--data FOLDER`. Nothing of that is in this notebook's outputs, since it needs a GPU;
# the path from prompt template to served weights is tested on a small Qwen2 made for it (`tests/test_real_models.py`).
# %% record @nbval-skip
record = {
    "profile": PROFILE, "seed": SEED, "steps": STEPS,
    "last": {name: {key: run.history[-1][key] for key in ("eval/pass@1", "eval/mean_length", "entropy")}
             for name, run in runs.items()},
}
(output_dir / "result.json").write_text(json.dumps(record, indent=1))
print("wrote result.json")
# %% md summary
# ## In short
#
# - Two engines with one config compute the same from the same tokens, and learn the same over seeds; single runs differ.
# - A group that lies in two processes is no error that anything reports. Rewards that compare must see whole groups.
# - Count memory before you rent: weights and optimiser do not depend on the batch, activations do.
#
# ## Exercises
#
# **1.** Bytes for training `n` weights of `width` bytes each with Adam, activations left out: weights, gradients, and two moments, all of that width.
# %% exercise-training-bytes
def training_bytes(n, width):
    """1_000, 4 -> 16_000"""
    ...


check.training_bytes(training_bytes)
# %% md solution-training-bytes
# <details><summary>Solution</summary>
#
# ```python
# def training_bytes(n, width):
#     return 4 * n * width
# ```
#
# </details>
#
# **2.** The least time of one decode step in seconds. It must read `weight_bytes` once and `cache_bytes` for each of `rows`, at `bandwidth` bytes a second, and compute 2 · `n` operations
# a row at `flops` a second. Both can go on at once.
# %% exercise-decode-floor
def decode_floor(n, weight_bytes, cache_bytes, rows, bandwidth, flops):
    """1e9, 2e9, 0, 1, 1e12, 1e14 -> 0.002"""
    ...


check.decode_floor(decode_floor)
# %% md solution-decode-floor
# <details><summary>Solution</summary>
#
# ```python
# def decode_floor(n, weight_bytes, cache_bytes, rows, bandwidth, flops):
#     return max((weight_bytes + rows * cache_bytes) / bandwidth, 2 * n * rows / flops)
# ```
#
# </details>
#
# **3.** `rows` completions a process, `processes` of them, groups of `size` one after the other. How many groups lie in more than one process?
# %% exercise-split-groups
def split_groups(rows, processes, size):
    """12, 2, 8 -> 1"""
    ...


check.split_groups(split_groups)
# %% md solution-split-groups
# <details><summary>Solution</summary>
#
# ```python
# def split_groups(rows, processes, size):
#     starts = range(0, rows * processes, size)
#     return sum(start // rows != (start + size - 1) // rows for start in starts)
# ```
#
# </details>
#
# **4.** For an evening with a GPU: the five commands of Step 5. Put the numbers beside the two claims on GSM8K in notebook 07's table (`grpo-kit run basic --profile colab`).
