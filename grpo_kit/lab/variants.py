"""One run of a method, by the kit's trainer or by TRL's: `grpo-kit train`."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    rewards: Sequence[Callable] = (), changes: Mapping[str, Any] | None = None,
    replay: bool = False, **options: Any,
) -> Path | None:  # fmt: skip
    """Train the profile's policy by the rewards and the batches of a variant.

    `rewards` take the place of those of the variant "basic", `changes` are to the config that the
    variant has. `replay` records what `grpo-kit replay` shows (kit only); the other options are
    `train`'s. Returns the folder of the trained policy, and None in all processes of a run but the
    first. Raises ValueError where variant and options do not fit.
    """
    if rewards and variant != "basic":
        raise ValueError(f"--reward replaces the rewards of {variant!r}: leave out --variant.")
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
    profile = profile.with_config(**{**experiment.changes, **arm.changes, **(changes or {})})
    task = (experiment.task or profile.load_task)()  # before the model: a folder may be missing

    options |= {"output_dir": output_dir, "seed": seed, "resume": resume}
    if engine == "kit":
        from grpo_kit import training as trainer

        if replay:
            options["record"] = Recorder(output_dir)
    else:
        from grpo_kit import trl_bridge as trainer

        trainer.join(profile.device)
    policy, config = profile.load_policy(), profile.config
    if arm.batch_source:
        base = profile.load_policy()
        options["measure"] = experiment.watch(profile, base, task, config, seed, False)
        options["batch_source"] = arm.batch_source(profile)
    rewards = rewards or arm.rewards(profile, config, policy)
    trainer.train(policy, task, rewards, config, **options)

    saved = None
    if os.environ.get("RANK", "0") == "0":
        saved = save_policy(policy, output_dir / "policy")
    if engine == "trl":
        trainer.leave()
    return saved
