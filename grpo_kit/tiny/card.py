"""Measure a tiny base on test problems, skill by skill, and render its model card.

Notebook 03 measures its judgements, notebook 06 whole episodes of Flow-GRPO.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import torch
from jinja2 import Environment, PackageLoader

from grpo_kit.flow.roles import read_action
from grpo_kit.generation import reply
from grpo_kit.models import Policy
from grpo_kit.rewards import extract_answer, read_yes
from grpo_kit.tiny import problems as P
from grpo_kit.tiny import skills as S

TEMPLATES = Environment(
    loader=PackageLoader("grpo_kit.tiny"), trim_blocks=True, keep_trailing_newline=True
)


def by_style(styles: Iterable[str], right: Sequence[bool]) -> dict[str, dict[str, float]]:
    """Of each style: its `share` of all texts and its `accuracy` when used."""
    hits = defaultdict(list)
    for style, hit in zip(styles, right, strict=True):
        hits[style].append(hit)
    by_share = sorted(hits.items(), key=lambda item: -len(item[1]))
    return {s: {"share": len(h) / len(right), "accuracy": fmean(h)} for s, h in by_share}


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Chance that a right one is scored above a wrong one, ties half; NaN without both."""
    scores = torch.tensor(scores, dtype=torch.float64)
    labels = torch.tensor(labels, dtype=torch.bool)
    right, wrong = scores[labels][:, None], scores[~labels]
    above, equal = (right > wrong).double(), (right == wrong).double()
    return (above + equal / 2).mean().item()


def texts_of(
    policy, conversations, generator=None, *, num_generations=1, limit=96, batch_size=64, **options
) -> list[str]:
    """The policy's replies, sampled if a generator is given, else the most likely ones.

    `limit` is in tokens, `batch_size` in conversations; `options` are those of `generate`.
    """
    options |= {"do_sample": generator is not None, "generator": generator}
    options |= {"max_new_tokens": limit, "batch_size": batch_size * num_generations}
    rollouts = reply(policy, conversations, num_generations, **options)
    return policy.decode(rollouts.completion_lists())


def _user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def measure(policy: Policy, *, n: int = 256, seed: int = 0) -> dict:
    """The skills table, as nested plain dicts: `n` test problems a skill, at temperature 1."""
    rng = random.Random(f"card-{seed}")
    generator = torch.Generator().manual_seed(seed)
    problems = [S.make_subject("solve", rng, "test") for _ in range(n)]
    table: dict = {"n": n, "seed": seed}
    table["solve"], texts, right = measure_solve(policy, problems, generator)

    solved = [S.exchange(problems[i // 8].question, text) for i, text in enumerate(texts)]
    readings = read_yes(policy, [[messages + _user(S.META_QUESTION)] for messages in solved])
    table["meta"] = {"auc": auc([row[0].p_yes for row in readings], right)}

    items = [S.verify_item(problem, rng) for problem in problems]
    verdicts, scores = graded(policy, items, extract_answer, S.verify_style, generator)
    table["verify"] = scores | {"yes_rate": fmean(verdict == "Yes" for verdict in verdicts)}

    questions = [S.make_subject("plan", rng, "test") for _ in range(n)]
    items = [S.plan_item(question, rng) for question in questions]
    _, scores = graded(policy, items, lambda x: read_action(x).step, S.plan_style, generator)
    table["plan"] = {"next_step": scores["accuracy"], "by_style": scores["by_style"]}
    return table


def measure_solve(policy, problems, generator) -> tuple[dict, list[str], list[bool]]:
    """The scores in solving, with eight samples of each problem and which of these are right."""
    requests = [_user(problem.question) for problem in problems]
    answers = [problem.answer for problem in problems]
    greedy = texts_of(policy, requests)
    sampled = texts_of(policy, requests, generator, num_generations=8, batch_size=16)
    right = [S.is_right(answers[i // 8], text) for i, text in enumerate(sampled)]
    table = {
        "greedy": fmean(map(S.is_right, answers, greedy)),
        "pass@1": fmean(right),
        "pass@8": fmean(any(right[i : i + 8]) for i in range(0, len(right), 8)),
        "by_style": by_style(map(P.solution_style, sampled), right),
    }
    return table, sampled, right


def graded(policy, items, read: Callable, style_of: Callable, generator) -> tuple[list, dict]:
    """The replies to (request, right reply) items, read by `read`, and the share that is right."""
    texts = texts_of(policy, [[request] for request, _ in items], generator)
    replies = [read(text) for text in texts]
    right = [reply == gold for reply, (_, gold) in zip(replies, items, strict=True)]
    return replies, {"accuracy": fmean(right), "by_style": by_style(map(style_of, texts), right)}


def card_text(table: dict, warm_up: dict) -> str:
    """The model card in Markdown: recipe and measured skills."""
    return TEMPLATES.get_template("card.md.j2").render(warm_up, skills=table)
