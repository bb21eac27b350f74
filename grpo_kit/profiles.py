"""Machines by name, `data/profiles.yaml`, each with its policy, task, judge and settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import yaml

from grpo_kit import tasks
from grpo_kit.config import GRPOConfig
from grpo_kit.paths import data_dir
from grpo_kit.tasks.own import read_task

if TYPE_CHECKING:
    from grpo_kit.flow import AgentSystem
    from grpo_kit.models import Policy


@dataclass(frozen=True)
class Profile:
    """A machine's choice of policy, task and run length."""

    name: str
    config: GRPOConfig
    policy: str  # a folder of the kit's data, "smollm2", or a Hub name
    revision: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    lora_rank: int = 0  # 0 = train all weights
    task: str = "word_problems"
    data: str | None = None  # a reader's own rows, see `with_data`
    test: str | None = None
    test_share: float = 0.2
    embedder: str = "minilm"  # for `load_embedder`
    judge: str = "tiny"  # a frozen tiny base, "self" (any frozen policy), or a model's name
    roles: str = "tiny"  # of Flow-GRPO, the frozen ones: a tiny base, or "self" (any frozen policy)
    threads: int | None = None  # torch threads that the notebooks set
    shares: Mapping[str, Any] = field(default_factory=dict)  # of the tiny base, see `with_shares`
    # task -> the kit's folder with the LoRA weights of its warm-up; without any, none is needed
    adapters: Mapping[str, str] = field(default_factory=dict)

    @property
    def adapter(self) -> str | None:
        """The folder of the task's warm-up. ValueError where there are others but not this one."""
        if self.adapters and self.task not in self.adapters:
            known = f"profile {self.name!r} is warmed up for {', '.join(self.adapters)}"
            raise ValueError(f"{known}, not for {self.task}: choose one of them.")
        return self.adapters.get(self.task)

    def with_skills(self) -> Profile:
        """This profile with a policy that can also judge, verify and plan.

        SmolLM2 takes its warm-up on the tiny world's skills, and fewer steps, since a reward soon
        moves the styles of its answers.
        """
        if not self.adapters:
            return self
        return replace(self, task="word_problems", config=replace(self.config, max_steps=8))

    def with_policy(self, policy: str) -> Profile:
        """This profile with another policy; a warm-up is only added to the model it was made of."""
        from grpo_kit import smollm2

        adapters = self.adapters if policy in (smollm2.NAME, smollm2.ON_HUB) else {}
        return replace(self, policy=policy, revision=None, adapters=adapters)

    def with_shares(
        self, folder: str | None = None, *, real: bool = False, **shares: Any
    ) -> Profile:
        """This profile with a tiny base that was shown other shares, see `tiny.world.make_world`.

        The base is made when it is first loaded, in a minute, and kept in `folder`, by default in
        the cache; on smoke in seconds, so it hardly changes. Other policies stay as they are, but
        if `real`, SmolLM2 goes on with its warm-up for the skills, ten minutes on two cores.
        """
        if real and self.adapter == "smol-skills":
            return replace(self, shares={"start": self.adapter, "steps": 60, **shares})
        if self.policy != "tiny-base":
            return self
        quick = {"steps": 8} if self.name == "smoke" else {}
        return replace(self, shares={"folder": folder, **shares, **quick})

    def with_data(self, data: str, test: str | None = None, test_share: float = 0.2) -> Profile:
        """This profile with rows of `tasks.own.read_task`, asked by the task's system prompt."""
        return replace(self, data=data, test=test, test_share=test_share)

    def with_config(self, **changes: Any) -> Profile:
        """This profile with changed fields of its config; raises as `GRPOConfig`."""
        return replace(self, config=replace(self.config, **changes))

    def use_threads(self) -> None:
        """Use the profile's threads unless OMP_NUM_THREADS is set: two runs may share the cores."""
        if self.threads and "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(self.threads)

    def load_policy(self) -> Policy:
        """The policy, ready to train. Raises RuntimeError where the device is missing."""
        from grpo_kit.models import load_policy

        path = data_dir() / self.policy
        options = {"revision": self.revision, "device": self.device}
        options |= {"dtype": self.dtype, "lora_rank": self.lora_rank}
        if self.shares:
            from grpo_kit.tiny.world import make_world
            from grpo_kit.warm_up import more_skills

            path = make_world(**{"make": more_skills} if self.adapter else {}, **self.shares)
        elif self.adapter:
            options["adapter"] = data_dir() / self.adapter
        policy = load_policy(path if path.is_dir() else self.policy, **options)
        policy.compute_in(self.config.bf16)
        return policy

    def load_judge(self, policy: Policy) -> Any:
        """The judge: a frozen copy of `policy`, or the model behind an endpoint.

        That is GRPO_KIT_JUDGE_URL, by default a vLLM server on this machine. Its key is in
        JUDGE_KEY (any text, where the server wants none); else ValueError.
        """
        from grpo_kit.rewards.judge import EndpointJudge, LocalJudge, quality_prompt

        if self.judge == "tiny":
            return LocalJudge(policy)
        if self.judge == "self":
            return LocalJudge(policy, prompt=quality_prompt, max_new_tokens=256)
        url = os.environ.get("GRPO_KIT_JUDGE_URL", "http://127.0.0.1:8000/v1")
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        request = {"temperature": 0.0, "max_tokens": 1024, "extra_body": quiet}
        address = {"base_url": url, "api_key_env": "JUDGE_KEY"}
        return EndpointJudge(self.judge, **address, concurrency=32, request=request)

    def load_agents(self, policy: Policy, **limits: Any) -> AgentSystem:
        """Flow-GRPO's roles and tools around `policy` as planner; `limits` are `agent_system`'s.

        The frozen roles are a copy of `policy` as it is now.
        """
        from grpo_kit.flow import GENERAL, TINY, Lookup, Tool, Toolkit, agent_system, calculator
        from grpo_kit.tasks.tool_questions import catalogue_path

        lookup = Tool(Lookup(catalogue_path()), columns=("catalogue",))
        toolkit = Toolkit([lookup, calculator])
        if self.roles == "tiny":
            return agent_system(policy, toolkit, prompts=TINY, **limits)
        limits = {"max_reply_tokens": 256, **limits}
        return agent_system(policy, toolkit, prompts=GENERAL, **limits)

    def load_task(self) -> tasks.Task:
        """The profile's train and test rows; raises as `tasks.load` or `read_task`."""
        if self.data is None:
            return tasks.load(self.task)
        system = tasks.system_prompt(self.task)
        return read_task(self.data, self.test, self.test_share, system)


def _shipped() -> dict[str, Profile]:
    """The profiles of `data/profiles.yaml`. GRPO_KIT_DEVICE is the device of smol."""
    profiles = {}
    entries = yaml.safe_load((data_dir() / "profiles.yaml").read_text(encoding="utf-8"))
    for name, fields in entries.items():
        fields["config"] = GRPOConfig(**fields["config"])
        profiles[name] = Profile(name, **fields)
    device = os.environ.get("GRPO_KIT_DEVICE", "cpu")
    return profiles | {"smol": replace(profiles["smol"], device=device)}


PROFILES = _shipped()
