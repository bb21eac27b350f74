"""Measure a tiny base, skill by skill and style by style, and write its model card.

`measure` samples and `card_text` tells; the scoring functions between them take texts alone, so
that they can be checked on texts whose scores are known. Test problems and test catalogues only.
"""

import random
from collections import Counter
from collections.abc import Sequence

import torch
from scipy.stats import rankdata, spearmanr

from grpo_kit.flow import Tool, Toolkit, agent_system, calculator, play
from grpo_kit.flow.roles import read_action
from grpo_kit.flow.toolbox import NOT_FOUND
from grpo_kit.generation import reply
from grpo_kit.models import Policy
from grpo_kit.rewards import extract_answer, read_yes
from grpo_kit.rewards.judge import parse_judgement, tiny_prompt
from grpo_kit.tasks.tool_questions import ToolQuestion, make_tool_question
from grpo_kit.tasks.word_problems import Problem, make_problem
from grpo_kit.tiny import problems as P
from grpo_kit.tiny import skills as S

TURN_LIMIT = 6  # planner turns of an episode of tool questions


def by_style(styles: Sequence[str], right: Sequence[bool]) -> dict[str, dict[str, float]]:
    """Of each style: its `share` of all texts and its `accuracy` when used."""
    counts, hits = Counter(styles), Counter(s for s, r in zip(styles, right, strict=True) if r)
    return {
        style: {"share": count / len(styles), "accuracy": hits[style] / count}
        for style, count in counts.most_common()
    }


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Chance that a right one is scored above a wrong one, ties half; NaN without both."""
    positive = sum(labels)
    negative = len(labels) - positive
    if not positive or not negative:
        return float("nan")
    ranks = rankdata(scores)
    above = sum(rank for rank, label in zip(ranks, labels, strict=True) if label)
    return (above - positive * (positive + 1) / 2) / (positive * negative)


def parse_scores(text: str) -> float | None:
    """Mean of the four scores of a judgement, 1..5; None where it cannot be read."""
    try:
        return parse_judgement(text).mean
    except ValueError:
        return None


def judge_table(
    problems: Sequence[Problem], responses: Sequence[str], replies: Sequence[str]
) -> dict[str, float]:
    """Share of replies that parse, and Spearman's correlation of their means with the rubric's."""
    pairs = [
        (mean, sum(S.rubric(problem.answer, response).values()) / len(S.CRITERIA))
        for problem, response, reply in zip(problems, responses, replies, strict=True)
        if (mean := parse_scores(reply)) is not None
    ]
    varied = len(pairs) > 1 and all(len(set(column)) > 1 for column in zip(*pairs, strict=True))
    return {
        "parsed": len(pairs) / len(replies),
        "spearman": float(spearmanr(*zip(*pairs, strict=True)).statistic) if varied else 0.0,
    }


# --------------------------------------------------------------------------- with a policy


def texts_of(
    policy: Policy,
    conversations: Sequence[list[dict]],
    generator: torch.Generator | None = None,
    *,
    num_generations: int = 1,
    temperature: float = 1.0,
    limit: int = 96,
    batch_size: int = 64,
) -> list[str]:
    """The policy's replies, sampled if a generator is given, else the most likely ones."""
    if not conversations:
        return []
    rollouts = reply(
        policy,
        conversations,
        num_generations,
        max_new_tokens=limit,
        batch_size=batch_size * num_generations,
        temperature=temperature,
        do_sample=generator is not None,
        generator=generator,
    )
    return policy.decode(rollouts.completion_lists())


def succeed(
    policy: Policy, questions: Sequence[ToolQuestion], generator: torch.Generator
) -> list[bool]:
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
    episodes = play(agent_system(policy, toolkit, max_turns=TURN_LIMIT), rows, generator=generator)
    return [
        extract_answer(episode.output) == str(question.answer)
        for question, episode in zip(questions, episodes, strict=True)
    ]


def _user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def measure(policy: Policy, *, n: int = 256, seed: int = 0) -> dict:
    """The skills table: every skill on `n` test problems, sampled at temperature 1.

    The judge and the frozen roles of tool use, which are never trained, reply greedily.

    Returns nested plain dicts; shares, accuracies, AUC and correlation, all in 0..1.
    """
    if n < 2:
        raise ValueError(f"n is {n}; take at least 2 problems.")
    rng = random.Random(f"card-{seed}")
    generator = torch.Generator().manual_seed(seed)
    problems = [make_problem(rng, rng.choice(S.DIFFICULTIES), "test") for _ in range(n)]
    table: dict = {"n": n, "seed": seed}

    # solve
    asked = [_user(problem.question) for problem in problems]
    greedy = texts_of(policy, asked)
    sampled = texts_of(policy, asked, generator, num_generations=8, batch_size=16)
    repeated = [problem for problem in problems for _ in range(8)]
    right = [S.is_right(p.answer, text) for p, text in zip(repeated, sampled, strict=True)]
    table["solve"] = {
        "greedy": sum(S.is_right(p.answer, text) for p, text in zip(problems, greedy, strict=True))
        / n,
        "pass@1": sum(right) / len(right),
        "pass@8": sum(any(right[i : i + 8]) for i in range(0, len(right), 8)) / n,
        "by_style": by_style([P.solution_style(text) for text in sampled], right),
    }

    # meta: P("Yes") after the policy's own first sample of each problem
    own, truth = sampled[::8], right[::8]
    asked_after = [
        [*_user(problem.question), {"role": "assistant", "content": text}]
        for problem, text in zip(problems, own, strict=True)
    ]
    readings = read_yes(
        policy,
        [
            [c + _user(S.META_QUESTION), c + _user(S.reference_question(str(p.answer)))]
            for c, p in zip(asked_after, problems, strict=True)
        ],
    )
    plain, shown = ([row[k].p_yes for row in readings] for k in range(2))
    table["meta"] = {
        "auc": auc(plain, truth),
        "mean_yes": sum(plain) / n,
        "accuracy_with_reference": sum((p > 0.5) == t for p, t in zip(shown, truth, strict=True))
        / n,
    }

    # verify
    items = [S.sample_verify(problem, rng)[0] for problem in problems]
    labels = [
        f"Proposed answer: {problem.answer}\n" in item["content"]
        for problem, item in zip(problems, items, strict=True)
    ]
    verdicts = texts_of(policy, [[item] for item in items], generator)
    right = [
        extract_answer(text) == ("Yes" if label else "No")
        for text, label in zip(verdicts, labels, strict=True)
    ]
    table["verify"] = {
        "accuracy": sum(right) / n,
        "yes_rate": sum(extract_answer(text) == "Yes" for text in verdicts) / n,
        "by_style": by_style([S.verify_style(text) for text in verdicts], right),
    }

    # judge: on the policy's own solutions; like every frozen role it says what is likeliest
    judged = [tiny_prompt(p.question, text) for p, text in zip(problems, own, strict=True)]
    table["judge"] = judge_table(problems, own, texts_of(policy, judged))

    # plan, execute, check, answer
    questions = [make_tool_question(rng, "test") for _ in range(n)]
    memories = []
    for question in questions:
        memory = S.sample_memory(question, rng)
        memories.append([] if question.next_step(memory) is None else memory)
    asked = [
        _user(S.plan_prompt(q.text, S.memory_text(memory)))
        for q, memory in zip(questions, memories, strict=True)
    ]
    plans = texts_of(policy, asked, generator)
    right = [
        read_action(text).step == S.step_text(question.next_step(memory))
        for text, question, memory in zip(plans, questions, memories, strict=True)
    ]
    table["plan"] = {
        "next_step": sum(right) / n,
        "episode_success": sum(succeed(policy, questions, generator)) / n,
        "by_style": by_style([S.plan_style(text) for text in plans], right),
    }
    return table


# what a base must measure before it is shipped: (skill, number, lowest, highest)
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


def card_text(table: dict, warm_up: dict) -> str:
    """The model card in Markdown: recipe, cost, measured skills, limits; nothing typed by hand."""
    lines = [
        "# Tiny base of grpo-kit",
        "",
        f"Qwen2 architecture, {warm_up['parameters']:,} parameters, trained from scratch by "
        f"`grpo-kit pretrain --seed {warm_up['seed']} --steps {warm_up['steps']} --processes "
        f"{warm_up['processes']}` in {warm_up['seconds'] / 60:.0f} minutes (last loss "
        f"{warm_up['loss']:.3f} nats a token).",
        "Texts are generated (`grpo_kit.tiny.skills`, where every planted imperfection is a named "
        "rate); no other data. It knows nothing else, and is no use outside this course.",
        "",
        f"Measured on {table['n']} test problems, seed {table['seed']}, temperature 1 "
        "(judge and tool roles: the likeliest reply):",
        "",
        "| skill | measure | value | wanted | |",
        "|---|---|---|---|---|",
    ]
    for skill, name, low, high in LIMITS:
        value = table[skill][name]
        verdict = "yes" if low <= value <= high else "**no**"
        lines.append(f"| {skill} | {name} | {value:.3f} | {low:.2f}–{high:.2f} | {verdict} |")
    for skill in ("solve", "verify", "plan"):
        lines += ["", f"| {skill}: style | share | right when used |", "|---|---|---|"]
        for style, values in table[skill]["by_style"].items():
            lines.append(f"| {style} | {values['share']:.3f} | {values['accuracy']:.3f} |")
    return "\n".join(lines) + "\n"
