"""Configs that make a record one that the kit would run like this today."""

from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.profiles import PROFILES


def config_today(arm: str, experiment: str = "diversity", profile: str = "tiny", **rest) -> dict:
    """That of an arm; a small one for what the kit does not know."""
    known = EXPERIMENTS.get(experiment)
    if known is None or arm not in known.arms or profile not in PROFILES:
        return {"max_steps": 2, "generation_batch_size": 8, "learning_rate": 2e-4}
    return known.identity(PROFILES[profile], arm)
