"""One run of a method, by the kit's trainer or by TRL's: `grpo-kit train`."""

import os
from dataclasses import replace
from pathlib import Path

from grpo_kit.course.replay import Recorder
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.models import save_policy
from grpo_kit.profiles import Profile

# By name: the experiment and the arm that is trained.
VARIANTS = {
    "basic": ("variants", "plain"),
    "diversity": ("variants", "diversity"),
    "judge": ("variants", "judge"),
    "meta": ("variants", "P(Yes), no labels"),
    "verification": ("verification", "mixed"),
    "flow": ("flow", "trajectory"),
}
KIT_ONLY = {  # why TRL's trainer cannot train them
    "verification": "self-verification makes its prompts anew at each step, TRL's are fixed",
    "flow": "an episode has several prompts that share an advantage, TRL's trainer takes one",
}


def train_variant(
    variant: str, profile: Profile, *, engine: str, output_dir: Path, seed: int, resume: bool,
    steps: int | None = None, replay: bool = False, vllm: str | None = None,
    vllm_share: float = 0.3,
) -> Path | None:  # fmt: skip
    """Train the profile's policy by the rewards and the batches of a variant.

    `replay` records what `grpo-kit replay` shows (kit only). `vllm` and `vllm_share` are those of
    `trl_bridge.vllm_options` (TRL only). Returns the folder of the trained policy, and None in all
    processes of a run but the first. Raises ValueError where variant and options do not fit.
    """
    if vllm and engine == "kit":
        raise ValueError("--vllm is for TRL's trainer: add --engine trl, or leave it out.")
    if replay and engine == "trl":
        raise ValueError("--replay is for the kit's trainer: leave out --engine trl.")
    if engine == "kit" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the kit's trainer runs in one process: add --engine trl for several.")
    if variant in KIT_ONLY and engine == "trl":
        raise ValueError(f"{KIT_ONLY[variant]}: leave out --engine trl.")
    name, arm = VARIANTS[variant]
    experiment, arm = EXPERIMENTS[name], EXPERIMENTS[name].arms[arm]
    if experiment.task and profile.data:
        raise ValueError(f"variant {variant!r} has questions of its own: leave out --data.")
    if variant not in ("basic", "diversity"):
        profile = profile.with_skills()
    changes = {**experiment.changes, **arm.changes}
    if steps is not None:
        changes["max_steps"] = steps
    if vllm:  # its probabilities differ slightly from those that TRL computes
        changes["importance_sampling_cap"] = 2.0
    config = replace(profile.config, **changes)
    profile = replace(profile, config=config)
    task = (experiment.task or profile.load_task)()  # before the model: a folder may be missing

    options = {"output_dir": output_dir, "seed": seed, "resume": resume}
    if engine == "kit":
        from grpo_kit import training as trainer

        if replay:
            options["record"] = Recorder(output_dir)
    else:
        from grpo_kit import trl_bridge as trainer

        trainer.join(profile.device)
        options |= trainer.vllm_options(vllm, vllm_share) if vllm else {}
    policy = profile.load_policy()
    if arm.batch_source:
        base = profile.load_policy()
        options["measure"] = experiment.watch(profile, base, task, config, seed, False)
        options["batch_source"] = arm.batch_source(profile)
    trainer.train(policy, task, arm.rewards(profile, config, policy), config, **options)

    saved = None
    if os.environ.get("RANK", "0") == "0":
        saved = save_policy(policy, output_dir / "policy")
    if engine == "trl":
        trainer.leave()
    return saved
