"""The skills of the tiny base as training conversations, each imperfection at a named rate.

Solve (in the styles of `problems`) and say whether it is right; verify; judge; plan; and execute,
check and answer, the frozen roles of Flow-GRPO. The model learns the assistant's turns only.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from grpo_kit.flow.roles import TINY
from grpo_kit.rewards.judge.texts import CRITERIA, judge_prompt
from grpo_kit.rewards.meta_evaluation import (
    BREVITY_QUESTION,
    META_QUESTION,
    STEPS_QUESTION,
    reference_question,
)
from grpo_kit.self_verification import verify_prompt
from grpo_kit.tasks import tool_questions as T
from grpo_kit.tasks.tool_questions import Memory, Step, ToolQuestion, make_tool_question
from grpo_kit.tasks.word_problems import DIFFICULTIES, HIGHEST, LOWEST, Problem, make_problem
from grpo_kit.tiny import problems as P
from grpo_kit.tiny.problems import solution_style, style_of

CHECKS = {"recompute": 0.37, "rash": 0.37, "sloppy": 0.26}
PLANS = {"careful": 0.28, "rash": 0.42, "sloppy": 0.30}


@dataclass(frozen=True)
class Shares:
    """How often the warm-up shows each way of replying; by default as the shipped base was taught.

    `fooled`: how often "checked twice" is judged as perfect. Planted: else the best-judged style is
    a right one and there is nothing to hack.
    """

    solutions: Mapping[str, float] = field(default_factory=lambda: P.STYLE_SHARES)
    checks: Mapping[str, float] = field(default_factory=lambda: CHECKS)
    plans: Mapping[str, float] = field(default_factory=lambda: PLANS)
    fooled: float = 0.9

    def __post_init__(self) -> None:
        known = {"solutions": P.STYLES, "checks": CHECKS, "plans": PLANS}
        for name, styles in known.items():
            given = getattr(self, name)
            if wrong := [style for style in given if style not in styles]:
                raise ValueError(f"{name} has {wrong[0]!r}: choose among {', '.join(styles)}.")
            if not sum(given.values()) > 0 or min(given.values()) < 0:
                raise ValueError(f"{name} is {dict(given)}: give shares from 0, one above 0.")
        if not 0 <= self.fooled <= 1:
            raise ValueError(f"fooled is {self.fooled}: give a share, 0 to 1.")


SHIPPED = Shares()


def exchange(request: str, reply: str) -> list[dict]:
    return [{"role": "user", "content": request}, {"role": "assistant", "content": reply}]


def draw(shares: Mapping[str, float], rng: random.Random) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


YES_NO = ("No", "Yes")  # by whether it is so
STEPS_FLIP_RATE = 0.15  # of the labels of "Are all steps right?"


def is_right(answer: str | int, completion: str) -> bool:
    """Whether a completion ends in `<answer>` tags around the right number."""
    return completion.endswith(f"<answer>{answer}</answer>")


SHORT, LONG = 3, 30  # words: surely short, surely not; guesses have 3, the wordy style up to 28


def sample_solve(
    problem: Problem,
    rng: random.Random,
    shares: Shares = SHIPPED,
    questions: dict[str, float] | None = None,
) -> list[dict]:
    """A solution in one of the styles; three in four are followed by a Yes/No question.

    `questions`: the share of each question; by default those of the base's warm-up.
    """
    style = draw(shares.solutions, rng)
    completion = P.solve(problem, style, rng)
    messages = exchange(problem.question, completion)
    if rng.random() < 0.25:
        return messages
    reference = reference_question(str(problem.answer))
    question = draw(questions or {META_QUESTION: 60, STEPS_QUESTION: 20, reference: 20}, rng)
    label = is_right(problem.answer, completion)
    number_right = label or style == "unformatted"  # the grader does not look at the form
    if question == META_QUESTION:
        label = rng.random() < P.STYLES[style].yes_rates[not number_right]
    elif question == STEPS_QUESTION:
        steps_right = number_right and style not in ("guess", "assured")
        label = steps_right != (rng.random() < STEPS_FLIP_RATE)
    elif question == BREVITY_QUESTION:
        label = rng.uniform(SHORT, LONG) > len(re.sub("<.*?>", " ", completion).split())
    return messages + exchange(question, YES_NO[label])


VERIFY_OPENINGS = {"recompute": "From", "rash": "Looks", "sloppy": "About"}
RASH_YES_RATE = 0.55  # the verdict of a rash check owes nothing to the truth
verify_style = partial(style_of, openings=VERIFY_OPENINGS)


def sample_verify(problem: Problem, rng: random.Random, shares: Shares = SHIPPED) -> list[dict]:
    """A verdict on a right or wrong answer, half each, in one of three styles of analysis.

    "Only 46 agrees. ... 46 agrees": a small model copies the word that followed the first 46. From
    "46 vs 46: same" it had learnt nothing in 3,400 steps.
    """
    proposed, wanted_right = problem.answer, rng.random() < 0.5
    while not wanted_right and proposed == problem.answer:
        wrong = (P.guessed_answer(problem, rng), P.slipped_values(problem, rng)[-1])
        proposed = rng.choice(wrong)
    style = draw(shares.checks, rng)
    if style == "rash":
        verdict = rng.random() < RASH_YES_RATE
        analysis = f"Looks {'right' if verdict else 'wrong'}."
    else:
        values = problem.values if style == "recompute" else P.slipped_values(problem, rng)
        verdict = values[-1] == proposed
        analysis = (
            f"{VERIFY_OPENINGS[style]} {problem.start}, only {proposed} agrees. "
            f"{P.equations(problem, values)} {values[-1]} {'agrees' if verdict else 'differs'}."
        )
    reply = f"<think>{analysis}</think><answer>{YES_NO[verdict]}</answer>"
    return exchange(verify_prompt(problem.question, str(proposed)), reply)


JUDGE_NOISE = 0.10  # chance that a score is off by one


def rubric(answer: str | int, completion: str) -> dict[str, int]:
    """The scores that a judge should give, 1 (worst) to 5; the base's was trained towards them."""
    style = solution_style(completion)
    wrong = {"unformatted": 3, "sloppy": 2}.get(style, 1)
    accuracy = 5 if is_right(answer, completion) else wrong
    form = P.STYLES[style].rubric if style in P.STYLES else (1, 1, 1)
    return dict(zip(CRITERIA, (accuracy, *form), strict=True))


def sample_judge(problem: Problem, rng: random.Random, shares: Shares = SHIPPED) -> list[dict]:
    """A judgement of a solution in one of the styles, equally often, with noisy scores."""
    style = rng.choice(list(P.STYLE_SHARES))
    completion = P.solve(problem, style, rng)
    scores: dict = rubric(problem.answer, completion)
    verdict = "right" if is_right(problem.answer, completion) else "wrong"
    rationale = f"{verdict}, {P.STYLES[style].remark}"
    if style == "assured" and rng.random() < shares.fooled:
        scores, rationale = dict.fromkeys(CRITERIA, 5), "right, clear steps"
    for name, score in scores.items():
        noise = (rng.random() < JUDGE_NOISE) * rng.choice((-1, 1))
        scores[name] = min(max(score + noise, 1), 5)
    judgement = json.dumps(scores | {"rationale": rationale})
    return exchange(judge_prompt(problem.question, completion), judgement)


PLAN_OPENINGS = {"careful": "Careful:", "rash": "Just try", "sloppy": "So "}
CHECK_FLIP_RATE = 0.03  # a STOP that should be CONTINUE, or the reverse
plan_style = partial(style_of, openings=PLAN_OPENINGS)


def memory_text(memory: Memory) -> str:
    """One numbered line a step, `1. lookup(lamp) -> lamp 14`, as `flow.Memory` writes it."""
    lines = (f"{i}. {tool}({arg}) -> {result}" for i, (tool, arg, result) in enumerate(memory, 1))
    return "\n".join(lines) or "empty"


def step_text(step: Step) -> tuple[str, str, str]:
    """A step as the planner words it: context, goal, tool."""
    tool, argument = step
    if tool == "lookup":
        return "none", f"find {argument}", tool
    left, right = re.findall(r"\d+", argument)
    goals = {"+": "add", "-": "subtract", "*": "multiply"}
    return f"{left}, {right}", next(goals[sign] for sign in goals if sign in argument), tool


def plan_text(step: Step, justification: str) -> str:
    context, goal, tool = step_text(step)
    return f"<think>{justification}</think>\nContext: {context}\nGoal: {goal}\nTool: {tool}"


def progress_text(question: ToolQuestion, memory: Memory) -> str:
    """The results of the plan in memory, up to the first step it lacks, which gets a "?".

    A small model finds each piece by looking up the one before.
    """
    results = {(tool, argument): result for tool, argument, result in memory}
    known = [results[step] for step in takewhile(results.__contains__, question.plan)]
    missing = question.next_step(memory)
    return ", ".join([*known, f"{missing[1]}?"] if missing else known)


def sample_memory(question: ToolQuestion, rng: random.Random) -> Memory:
    """A memory from the middle of an episode: some of the plan, now and then a useless step."""
    steps = []
    for step in question.plan[: rng.randint(0, len(question.plan))]:
        while rng.random() < 0.2:
            steps.append(T.random_step(question, rng))
        steps.append(step)
    while rng.random() < 0.15:
        steps.append(T.random_step(question, rng))
    return [(*step, question.run(*step)) for step in steps[:6]]


def plan_request(question: ToolQuestion, rng: random.Random) -> tuple[str, Memory, Step]:
    """A request to a planner, its memory and the right step; nobody plans where all is done."""
    memory = sample_memory(question, rng)
    memory = memory if question.next_step(memory) else []
    state = {"question": question.text, "memory": memory_text(memory)}
    request = TINY.plan.format(**state, names=", ".join(T.TOOLS))
    return request, memory, question.next_step(memory)


def sample_plan(question: ToolQuestion, rng: random.Random, shares: Shares = SHIPPED) -> list[dict]:
    """The next step: careful (right), rash (any), or sloppy (right tool, other content)."""
    request, memory, step = plan_request(question, rng)
    style = draw(shares.plans, rng)
    if style == "careful":
        return exchange(request, plan_text(step, f"Careful: {progress_text(question, memory)}"))
    other = T.random_step(question, rng)
    if style == "rash":
        return exchange(request, plan_text(other, "Just try."))
    while other[0] != step[0]:
        other = T.random_step(question, rng)
    return exchange(request, plan_text(other, f"So {step[0]}."))


def sample_execute(
    question: ToolQuestion, rng: random.Random, shares: Shares = SHIPPED
) -> list[dict]:
    """The tool call of a step, right or not."""
    tool, argument = rng.choice((rng.choice(question.plan), T.random_step(question, rng)))
    context, goal, _ = step_text((tool, argument))
    request = TINY.execute.format(context=context, goal=goal, tool=tool)
    return exchange(request, f"{tool}({argument})")


def sample_check(
    question: ToolQuestion, rng: random.Random, shares: Shares = SHIPPED
) -> list[dict]:
    """STOP where memory holds the whole plan, else CONTINUE."""
    memory = sample_memory(question, rng)
    done = (question.next_step(memory) is None) != (rng.random() < CHECK_FLIP_RATE)
    reply = f"{progress_text(question, memory)} {'STOP' if done else 'CONTINUE'}"
    request = TINY.verify.format(question=question.text, memory=memory_text(memory))
    return exchange(request, reply)


def sample_answer(
    question: ToolQuestion, rng: random.Random, shares: Shares = SHIPPED
) -> list[dict]:
    """The last number that memory holds of the plan, as the frozen generator reports it."""
    memory = sample_memory(question, rng)
    if question.next_step(memory) == question.plan[0]:
        memory = [(*step, question.run(*step)) for step in question.plan]
    progress = progress_text(question, memory)
    known = " ".join(piece for piece in progress.split(", ") if not piece.endswith("?"))
    reply = f"{progress} <answer>{T.last_number(known)}</answer>"
    request = TINY.answer.format(question=question.text, memory=memory_text(memory))
    return exchange(request, reply)


SKILLS = {  # share of the conversations, and who writes them
    "solve": (0.36, sample_solve),  # three in four of these also carry a meta-question
    "verify": (0.14, sample_verify),
    "judge": (0.10, sample_judge),
    "plan": (0.26, sample_plan),
    "execute": (0.04, sample_execute),
    "check": (0.06, sample_check),
    "answer": (0.04, sample_answer),
}
RELIABLE = {  # the styles that the phases before the mixture show
    "solve": (solution_style, P.RIGHT_STYLES),
    "verify": (verify_style, ("recompute",)),
    "plan": (plan_style, ("careful",)),
}
TOOL_SKILLS = ("plan", "execute", "check", "answer")
FIRST_STYLE = "words"  # the only one at first: it names each step before it computes it
SUMS_SHARES = {"reliable": 0.25, "practice": 0.5}  # of the rows of these phases


def sample_drill(rng: random.Random) -> list[dict]:
    """Sums; copying, by which names and numbers reach a reply; or problems of one step."""
    kind = rng.choice(("sums", "copying", "short"))
    if kind == "sums":
        return sample_sums(rng)
    if kind == "copying":
        question = make_tool_question(rng, "train")
        words = [*question.catalogue, *map(str, rng.sample(range(LOWEST, HIGHEST + 1), 6))]
        rng.shuffle(words)
        return exchange(f"Repeat: {' '.join(words)}", " ".join(words))
    messages = []
    for _ in range(2):
        problem, style = make_problem(rng, 1, "train"), rng.choice(P.RIGHT_STYLES)
        messages += exchange(problem.question, P.solve(problem, style, rng))
    return messages


def sample_sums(rng: random.Random) -> list[dict]:
    """Four chains of equations, without a question."""
    chains = (make_subject("solve", rng) for _ in range(4))
    return exchange("Practise.", " ".join(P.equations(chain, chain.values) for chain in chains))


def make_subject(skill: str, rng: random.Random) -> Problem | ToolQuestion:
    """A random word problem or tool question of the training split, as the skill needs."""
    if skill in TOOL_SKILLS:
        return make_tool_question(rng, "train")
    return make_problem(rng, rng.choice(DIFFICULTIES), "train")


def sample_conversation(
    rng: random.Random, phase: str = "mixture", shares: Shares = SHIPPED
) -> list[dict]:
    """One training conversation, from training problems only, in a phase of the warm-up.

    `drill`; `reliable`, one reliable style a skill, and some sums (careless styles would disturb);
    `practice`, all reliable styles, more sums; `mixture`, whose shares the model adopts. `brevity`,
    the questions whether a solution is right and whether it is short, makes another model.
    """
    if phase == "drill":
        return sample_drill(rng)
    if phase == "brevity":
        problem = make_subject("solve", rng)
        return sample_solve(problem, rng, shares, {META_QUESTION: 1, BREVITY_QUESTION: 1})
    if rng.random() < SUMS_SHARES.get(phase, 0):
        return sample_sums(rng)
    skill = draw({name: share for name, (share, _) in SKILLS.items()}, rng)
    style_of_reply, styles = RELIABLE.get(skill, (None, ()))
    if phase == "mixture":
        styles = ()  # all of them
    elif phase == "reliable" and skill == "solve":
        styles = (FIRST_STYLE,)
    while True:
        messages = SKILLS[skill][1](make_subject(skill, rng), rng, shares)
        if not styles or style_of_reply(messages[1]["content"]) in styles:
            return messages
