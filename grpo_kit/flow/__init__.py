"""Flow-GRPO: a trained planner among frozen roles and tools (AgentFlow, arXiv 2510.05592).

Not the image-diffusion method of the same name. In reading order: `episodes`, `tools`, `toolbox`
and `sandbox` (ready tools), `roles`, `rollout`, `training`.
"""

from grpo_kit.flow.episodes import Episode, Memory, Step, Turn, episode_advantages, turn_rows
from grpo_kit.flow.roles import GENERAL, TINY, FrozenRoles
from grpo_kit.flow.rollout import AgentSystem, agent_system, play
from grpo_kit.flow.toolbox import Lookup, calculator, make_catalogue
from grpo_kit.flow.tools import Tool, Toolkit
from grpo_kit.flow.training import (
    FlowGRPO,
    OfflineTraces,
    episode_metrics,
    evaluate_episodes,
    score_episodes,
)
