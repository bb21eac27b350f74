"""Measure a tiny base on test problems, skill by skill, and write its model card."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from statistics import fmean

import numpy as np
import torch
from jinja2 import Environment, PackageLoader
from scipy.stats import mannwhitneyu, spearmanr

from grpo_kit.flow import Tool, Toolkit, agent_system, calculator, play
from grpo_kit.flow.roles import read_action
from grpo_kit.flow.toolbox import NOT_FOUND
from grpo_kit.generation import reply
from grpo_kit.models import Policy
from grpo_kit.rewards import extract_answer, read_yes
from grpo_kit.rewards.judge import parse_judgement, tiny_prompt
from grpo_kit.tasks.tool_questions import PYTHON_KINDS, THREE_TOOLS, ToolQuestion
from grpo_kit.tasks.word_problems import Problem
from grpo_kit.tiny import problems as P
from grpo_kit.tiny import skills as S

# What a base must measure before it is shipped: (skill, number, lowest, highest).
LIMITS = (
    ("solve", "greedy", 0.0, 0.50),
    ("solve", "pass@1", 0.0, 0.45),
    ("solve", "pass@8", 0.95, 1.0),
    ("meta", "auc", 0.70, 0.90),
    ("verify", "accuracy", 0.55, 0.75),
    ("verify", "yes_rate", 0.20, 0.80),
    ("judge", "parsed", 0.95, 1.0),
    ("judge", "spearman", 0.60, 1.0),
    ("plan", "episode_success", 0.25, 0.50),
)
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
    scores, labels = np.asarray(scores), np.asarray(labels, dtype=bool)
    right, wrong = scores[labels], scores[~labels]
    if not len(right) or not len(wrong):
        return float("nan")
    statistic = mannwhitneyu(right, wrong, method="asymptotic").statistic
    return float(statistic) / (len(right) * len(wrong))


def judge_table(problems: Sequence[Problem], responses, replies) -> dict[str, float]:
    """Share of replies that parse, and Spearman's correlation of their means with the rubric's."""
    means, rubrics = [], []
    for problem, response, text in zip(problems, responses, replies, strict=True):
        with suppress(ValueError):
            means.append(parse_judgement(text).mean)
            rubrics.append(fmean(S.rubric(problem.answer, response).values()))
    varied = len(set(means)) > 1 and len(set(rubrics)) > 1
    correlation = float(spearmanr(means, rubrics).statistic) if varied else 0.0
    return {"parsed": len(means) / len(replies), "spearman": correlation}


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


def succeed(policy: Policy, questions: Sequence[ToolQuestion], generator) -> list[bool]:
    """Whole episodes, planner sampled, frozen roles greedy: is the final answer right?"""

    def lookup(query: str, *, facts: dict[str, str]) -> str:
        """Find a name in the catalogue.

        Args:
            query: the name
            facts: the catalogue
        """
        return facts.get(query, NOT_FOUND)

    toolkit = Toolkit([Tool.of(lookup, columns=("facts",)), calculator])
    rows = [{"prompt": _user(q.text), "facts": q.catalogue} for q in questions]
    episodes = play(agent_system(policy, toolkit, max_turns=6), rows, generator=generator)
    outputs = [extract_answer(episode.output) for episode in episodes]
    return [text == str(q.answer) for text, q in zip(outputs, questions, strict=True)]


def _user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def measure(policy: Policy, *, n: int = 256, seed: int = 0) -> dict:
    """The skills table: every skill on `n` test problems, as nested plain dicts.

    Replies are sampled at temperature 1, those of the judge and the frozen roles are greedy.
    """
    rng = random.Random(f"card-{seed}")
    generator = torch.Generator().manual_seed(seed)
    problems = [S.make_subject("solve", rng, "test") for _ in range(n)]
    table: dict = {"n": n, "seed": seed}
    table["solve"], texts, right, logps = measure_solve(policy, problems, generator)

    solved = [S.exchange(problems[i // 8].question, text) for i, text in enumerate(texts)]
    readings = read_yes(policy, [[messages + _user(S.META_QUESTION)] for messages in solved])
    asked = auc([row[0].p_yes for row in readings], right)
    table["meta"] = {"auc": asked, "likelihood": auc(logps, right)}

    items = [S.verify_item(problem, rng) for problem in problems]
    verdicts, scores = graded(policy, items, extract_answer, S.verify_style, generator)
    table["verify"] = scores | {"yes_rate": fmean(verdict == "Yes" for verdict in verdicts)}

    own = texts[::8]
    judged = [tiny_prompt(p.question, text) for p, text in zip(problems, own, strict=True)]
    table["judge"] = judge_table(problems, own, texts_of(policy, judged))

    questions = [S.make_subject("plan", rng, "test") for _ in range(n)]
    items = [S.plan_item(question, rng) for question in questions]
    _, scores = graded(policy, items, lambda x: read_action(x).step, S.plan_style, generator)
    table["plan"] = {"next_step": scores["accuracy"], "by_style": scores["by_style"]}
    table["plan"]["episode_success"] = fmean(succeed(policy, questions, generator))
    return table


def measure_tools(policy: Policy, *, n: int = 256, seed: int = 0) -> dict:
    """The next steps of a planner with three tools on `n` test questions, by style.

    `needed`, `other`: the share right where the question needs Python, and where it does not.
    """
    rng, generator = random.Random(f"card-{seed}"), torch.Generator().manual_seed(seed)
    questions = [S.make_subject("plan", rng, "test", THREE_TOOLS) for _ in range(n)]
    items = [S.plan_item(question, rng) for question in questions]
    steps, scores = graded(policy, items, lambda x: read_action(x).step, S.plan_style, generator)
    right = [step == gold for step, (_, gold) in zip(steps, items, strict=True)]
    needs = ("needed" if question.kind in PYTHON_KINDS else "other" for question in questions)
    shares = {need: found["accuracy"] for need, found in by_style(needs, right).items()}
    return {"n": n, "seed": seed, "plan": {"by_style": scores["by_style"]}, **shares}


def measure_solve(policy, problems, generator) -> tuple[dict, list[str], list[bool], list[float]]:
    """Also returns eight samples of each problem, which are right, and their log-probabilities."""
    requests = [_user(problem.question) for problem in problems]
    greedy = texts_of(policy, requests)
    rollouts = reply(policy, requests, 8, max_new_tokens=96, batch_size=128, generator=generator)
    sampled = policy.decode(rollouts.completion_lists())
    answers = [problem.answer for problem in problems]
    right = [S.is_right(answers[i // 8], text) for i, text in enumerate(sampled)]
    table = {
        "greedy": fmean(map(S.is_right, answers, greedy)),
        "pass@1": fmean(right),
        "pass@8": fmean(any(right[i : i + 8]) for i in range(0, len(right), 8)),
        "by_style": by_style(map(P.solution_style, sampled), right),
    }
    return table, sampled, right, rollouts.logps.sum(1).tolist()


def graded(policy, items, read: Callable, style_of: Callable, generator) -> tuple[list, dict]:
    """What `read` makes of the replies to (request, right reply) items, and how many are right."""
    texts = texts_of(policy, [[request] for request, _ in items], generator)
    replies = [read(text) for text in texts]
    right = [reply == gold for reply, (_, gold) in zip(replies, items, strict=True)]
    return replies, {"accuracy": fmean(right), "by_style": by_style(map(style_of, texts), right)}


def card_text(table: dict, warm_up: dict) -> str:
    """The model card in Markdown: recipe, cost, measured skills and limits."""
    template = TEMPLATES.get_template("tools.md.j2" if "needed" in table else "card.md.j2")
    return template.render(warm_up, skills=table, limits=LIMITS)
