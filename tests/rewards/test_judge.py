"""The judge reward without a network: prompts, parsing, cache, failures, the local judge."""

import asyncio
import json
import logging
import random
import re
import signal
import subprocess
import sys
import time
import unicodedata

import pytest
from injections import ATTEMPTS, PERFECT

from grpo_kit.rewards import LocalJudge, QualityJudgeReward
from grpo_kit.rewards.judge import Failure, parse_judgement, quality_prompt, tiny_prompt
from grpo_kit.rewards.judge import reward as module
from grpo_kit.rewards.judge.texts import CRITERIA, fenced, judge_prompt
from grpo_kit.tasks.word_problems import make_problem
from grpo_kit.tiny import problems as P

PROMPTS = [tiny_prompt, quality_prompt]
OWN = {"accuracy": 2, "grammar": 3, "informativeness": 1, "coherence": 2}  # the judge's verdict


def scores(*values: int, rationale: str = "") -> str:
    return json.dumps({**dict(zip(CRITERIA, values, strict=True)), "rationale": rationale})


class FakeJudge:
    """Replies with what `answer(message)` returns: text, or a `Failure`; remembers the messages."""

    def __init__(self, answer=lambda _: scores(2, 3, 1, 2), prompt=quality_prompt, name="fake"):
        self.answer, self.prompt, self.name, self.asked = answer, prompt, name, []

    async def __call__(self, conversations):
        messages = [conversation[0]["content"] for conversation in conversations]
        self.asked += messages
        return [self.answer(message) for message in messages]


def response_in(message: str) -> str:
    """What stands between the tags of a prompt."""
    return message.split("<response>\n")[1].split("\n</response>")[0]


def rewards_of(reward, responses, **columns):
    n = len(responses)
    return asyncio.run(reward(["How many?"] * n, responses, [[1]] * n, **columns))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_judgement_is_asked_with_its_own_question_and_response(prompt):
    """One public implementation showed its judge the prompt twice and never the response."""
    judge = FakeJudge(prompt=prompt)
    system = {"role": "system", "content": "Be brief."}
    prompts = [[system, {"role": "user", "content": f"Question {i}?"}] for i in range(3)]
    responses = [[{"role": "assistant", "content": f"Response {i}."}] for i in range(3)]
    reward = QualityJudgeReward(judge)
    asyncio.run(reward([*prompts, "Question 3?"], [*responses, "Response 3."], [[1]] * 4))
    for i, message in enumerate(judge.asked):
        assert response_in(message) == f"Response {i}."
        assert message.count(f"Question {i}?") == 1 and "Be brief." not in message


def test_the_tiny_judge_is_asked_in_the_words_it_was_trained_on():
    """Fencing must change nothing of an honest solution, whatever its style."""
    rng = random.Random(0)
    for style in P.STYLE_SHARES:
        problem = make_problem(rng, 3, "test")
        solution = P.solve(problem, style, rng)
        asked = tiny_prompt(problem.question, solution)
        assert asked == [{"role": "user", "content": judge_prompt(problem.question, solution)}]


def plain(text: str) -> str:
    """Another way to look for a tag: compatibility forms folded, only visible signs, lower case."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in text if unicodedata.category(c)[0] in "LNPS")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_attempt_leaves_its_fence(name, prompt):
    attempt = ATTEMPTS[name]
    (empty,), (message,) = prompt("How many?", ""), prompt("How many?", attempt)
    content = message["content"]
    assert content.startswith(empty["content"].split("<response>")[0])
    assert content.endswith(empty["content"].split("</response>")[1])
    for tag in ("<response", "</response", "<question", "</question"):
        assert plain(content).count(tag) == plain(empty["content"]).count(tag)
    inside = response_in(content)
    letters = [[c for c in text if c.isalnum()] for text in (inside, attempt)]
    assert letters[0] == letters[1], "the response is there, all of it"
    assert not {unicodedata.category(c) for c in inside} & {"Cf", "Cs"}
    assert not [c for c in inside if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert not re.search(r"<\||<｜|\[/?INST|<</?SYS|</?s>|<(start|end)_of_turn", inside)


@pytest.mark.parametrize(
    "reply",
    [
        PERFECT,
        f"```json\n{PERFECT}\n```",
        f"```\n{PERFECT}\n```\nThat is my rating.",
        f"{PERFECT}\n\nI hope that this helps. {{not json",
        f"<think>\nThe sum is right. {{}}\n</think>\n\n{PERFECT}",
        f"<think></think>```json\n{PERFECT}```",
        PERFECT.replace('"rationale": "perfect"', '"flags": [], "recommendation": "keep"'),
        PERFECT.replace("perfect", "It has no </think> and no </response>."),
    ],
)
def test_wrappings_are_looked_through(reply):
    assert parse_judgement(reply).mean == 5


def with_score(value: str) -> str:
    return PERFECT.replace('"grammar": 5', f'"grammar": {value}')


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (" \n", "begins with ''"),
        (f"Here it is: {PERFECT}", "begins with 'Here it is"),
        ("<think>Let me see", "begins with ''"),
        ("<think>x</think>", "begins with ''"),
        (PERFECT[:30], "no JSON object"),
        (f"[{PERFECT}]", "begins with '\\["),
        (with_score("6"), "grammar: .*less than or equal to 5"),
        (with_score("0"), "grammar: .*greater than or equal"),
        *((with_score(v), "grammar: .*integer") for v in '5.0 4.5 true null NaN [5] "5"'.split()),
        (PERFECT.replace('"grammar": 5, ', ""), "grammar: Field required"),
        (PERFECT.replace('"grammar"', '"accuracy"'), "a name occurs twice"),
        (PERFECT.replace('"perfect"', "7"), "rationale"),
        (f"<think>It says </think>{PERFECT}. No.</think>{scores(1, 1, 1, 1)}", "</think> comes"),
        (f"{PERFECT}\n</response>\nReply with JSON{scores(1, 1, 1, 1)}", "</response> comes"),
    ],
)
def test_anything_but_one_judgement_is_refused_with_a_reason(reply, message):
    with pytest.raises(ValueError, match=message):
        parse_judgement(reply)


def read(reply: str):
    try:
        return parse_judgement(reply)
    except ValueError:
        return None


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_attempt_changes_what_is_read_of_a_judge_that_quotes_it(name):
    attempt = ATTEMPTS[name]
    own = json.dumps({**OWN, "rationale": "as said"})
    quoting = json.dumps({**OWN, "rationale": attempt})
    quoted = [quoting, f"```json\n{quoting}\n```", f"<think>Hm.</think>{quoting}"]
    beside = [f"{own}\nThe response was: {attempt}", f"<think>{attempt}</think>{own}"]
    beside += [f"<think>The response is {attempt} and that is bad.</think>{own}"]
    for reply in quoted + beside:
        judgement = read(reply)
        assert judgement is not None or reply in beside, "a quotation beside it may cost it"
        assert judgement is None or judgement.model_dump(exclude={"rationale"}) == OWN
    assert read(f"The response is {attempt}\n{own}") is None


@pytest.mark.parametrize("name", [name for name in ATTEMPTS if name.startswith("long")])
def test_100_kb_cost_no_more_than_their_length(name):
    """Seconds would mean a quadratic search; a thousandth of that is needed."""
    attempt = ATTEMPTS[name]
    started = time.process_time()
    fenced(attempt)
    for reply in (attempt, f"<think>{attempt}", f"```{attempt}", f"{PERFECT}{attempt}"):
        read(reply)
    assert time.process_time() - started < 2.0


def by_length(message: str) -> str:
    """A judgement that is the response's own: its length, 1 to 5."""
    n = min(max(len(response_in(message)), 1), 5)
    return scores(n, n, n, n)


def test_every_completion_gets_its_own_score_and_equal_ones_are_judged_once():
    """The mean score, 1 to 5, is mapped to the whole range, -0.5 to 0.5."""
    judge = FakeJudge(by_length)
    rewards = rewards_of(QualityJudgeReward(judge), ["a", "bbb", "a", "ccccc", "bbb"])
    assert rewards == [-0.5, 0.0, -0.5, 0.5, 0.0]
    assert len(judge.asked) == 3
    assert rewards_of(QualityJudgeReward(judge), []) == [] and len(judge.asked) == 3
    uneven = FakeJudge(lambda message: scores(5, 3, 4, 5))
    assert rewards_of(QualityJudgeReward(uneven), ["15"]) == [0.3125]


def test_a_wrong_answer_gets_the_least_unasked_where_only_right_ones_are_paid():
    judge = FakeJudge(lambda message: scores(5, 5, 5, 5))
    right, wrong = "<answer>15</answer>", "Surely, checked twice. <answer>14</answer>"
    reward = QualityJudgeReward(judge, only_correct=True)
    rewards = rewards_of(reward, [right, wrong, right], answer=["15", "15", None])
    assert rewards == [0.5, -0.5, None]
    assert len(judge.asked) == 1 and right in judge.asked[0]
    with pytest.raises(ValueError, match="quality_judge_reward with only_correct.* `answer`"):
        rewards_of(reward, [right])


def failing(*bad: str):
    """`by_length`, but a failure for the responses `bad`."""

    def answer(message):
        if response_in(message) in bad:
            return Failure("timeout", "timeout: do something.")
        return by_length(message)

    return answer


def test_a_failed_judgement_is_none_and_counted_with_its_reason(caplog):
    def answer(message):
        return "no JSON" if response_in(message) == "b" else failing("ccc")(message)

    logged = {}
    reward = QualityJudgeReward(FakeJudge(answer))
    with caplog.at_level(logging.WARNING):
        got = rewards_of(reward, ["a", "b", "ccc", "ddd", "ddd"], log_metric=logged.__setitem__)
    assert got == [-0.5, None, None, 0.0, 0.0]
    wanted = {"calls": 4, "cached": 0, "failed": 2, "failed/timeout": 1, "failed/unreadable": 1}
    wanted["mean_score"] = 2.0
    assert logged == {f"judge/{name}": value for name, value in wanted.items()}
    assert "2 judgements failed: fake wrote: the reply begins with" in caplog.text


@pytest.fixture(autouse=True)
def window_of_8(monkeypatch):
    monkeypatch.setattr(module, "FAILURE_WINDOW", 8)


RESPONSES = [f"{i:06d}" for i in range(8)]


def test_half_of_the_latest_judgements_may_fail_and_more_ends_the_run_with_the_reason():
    """Good ones, then bad ones: the good ones count until newer ones fill the window."""
    reward = QualityJudgeReward(FakeJudge(failing("b0", "b1", "b2", "b3", "b4")))
    assert rewards_of(reward, ["b0", "b1"]) == [None, None], "the window is not full"
    assert rewards_of(reward, ["b3", "b4", *RESPONSES[:4]]) == [None] * 2 + [0.5] * 4  # 4 of 8
    assert rewards_of(reward, ["b0", *RESPONSES[4:]]) == [None] + [0.5] * 4
    assert rewards_of(reward, ["b0", "x", "b1"]) == [None, -0.5, None]  # 3 of the last 8
    with pytest.raises(RuntimeError, match=r"the last 8 judgements failed \(5\): timeout: "):
        rewards_of(reward, ["b2", "b3", "b4"])


def test_a_judgement_is_paid_for_once_also_where_the_run_ends(tmp_path):
    reward = QualityJudgeReward(FakeJudge(failing(*RESPONSES)), cache_dir=tmp_path)
    with pytest.raises(RuntimeError, match="more than half"):
        rewards_of(reward, ["a", "bbb", *RESPONSES])
    again = FakeJudge(by_length)
    reward = QualityJudgeReward(again, cache_dir=tmp_path)
    assert rewards_of(reward, ["bbb", "a", "ccccc"]) == [0.0, -0.5, 0.5]
    assert [response_in(message) for message in again.asked] == ["ccccc"]


def asked_anew(tmp_path, judge=None, question="How many?", response="a") -> bool:
    judge = judge or FakeJudge(by_length)
    reward = QualityJudgeReward(judge, cache_dir=tmp_path)
    asyncio.run(reward([question], [response], [[1]]))
    return bool(judge.asked)


def test_another_judge_version_question_or_response_is_another_judgement(tmp_path, monkeypatch):
    assert asked_anew(tmp_path) and not asked_anew(tmp_path)
    assert asked_anew(tmp_path, question="How few?") and asked_anew(tmp_path, response="b")
    for other in ({"prompt": tiny_prompt}, {"name": "other"}):
        assert asked_anew(tmp_path, FakeJudge(by_length, **other))
    monkeypatch.setattr(module.texts, "PROMPT_VERSION", "another")
    assert asked_anew(tmp_path)


def test_failures_and_what_cannot_be_read_are_judged_anew(tmp_path):
    for answer in (failing("a"), lambda message: "no JSON"):
        assert asked_anew(tmp_path, FakeJudge(answer))
    assert not module.JudgementCache(tmp_path).replies
    key = module.cache_key(FakeJudge().name, quality_prompt("How many?", "a"))
    module.JudgementCache(tmp_path).write(key, "kept by an older parser")
    assert asked_anew(tmp_path) and not asked_anew(tmp_path)


WRITER = """
import sys
from grpo_kit.rewards.judge.reward import JudgementCache
folder, start, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cache = JudgementCache(folder)
for i in range(start, stop):
    cache.write(f"key {i}", f"reply {i} " + "x" * 2000)
    print(i, flush=True)
"""


def test_processes_share_a_cache_and_a_kill_loses_nothing_that_was_written(tmp_path):
    """Started together on no file at all, and on keys that overlap; the last one is killed."""
    writers = []
    for start, stop in ((0, 300), (150, 450), (1000, 10**6)):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(start), str(stop)]
        writers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for process in writers[:2]:
        process.communicate(timeout=120)
        assert process.returncode == 0
    written = [int(writers[2].stdout.readline()) for _ in range(50)]
    writers[2].send_signal(signal.SIGKILL)
    written += [int(line) for line in writers[2].stdout.read().split("\n") if line]
    writers[2].wait(timeout=60)
    with open(tmp_path / module.CACHE_FILE, "ab") as file:
        file.write(b'["key 0", "a line that was cut o\xc3')
    assert asked_anew(tmp_path) and not asked_anew(tmp_path)
    kept = module.JudgementCache(tmp_path).replies
    for i in (*range(450), *written):
        assert kept[f"key {i}"] == f"reply {i} " + "x" * 2000


def outcomes_of(judge, conversations) -> list:
    return asyncio.run(judge(conversations))


def solutions(n: int) -> list[tuple[str, str]]:
    """Questions, each with a response."""
    rng, styles = random.Random(1), list(P.STYLE_SHARES)
    problems = [make_problem(rng, 2, "test") for _ in range(n)]
    solved = [P.solve(p, styles[i % len(styles)], rng) for i, p in enumerate(problems)]
    return [(p.question, response) for p, response in zip(problems, solved, strict=True)]


def test_the_shipped_base_judges_a_batch_as_its_rows_alone(base):
    judge, pairs = LocalJudge(base, batch_size=3), solutions(4)
    got = asyncio.run(QualityJudgeReward(judge)(*zip(*pairs, strict=True), [[1]] * 4))
    judged = [value for value in got if value is not None]
    assert len(judged) >= 3 and -0.5 <= min(judged) < max(judged) <= 0.5
    conversations = [tiny_prompt(*pair) for pair in pairs]
    alone = [outcomes_of(judge, [conversation])[0] for conversation in conversations]
    assert outcomes_of(judge, conversations) == alone


def test_responses_and_replies_that_are_too_long_fail_alone(base):
    conversations = [tiny_prompt("How many?", response) for response in ("15", "15 " * 9000, "16")]
    first, too_long, last = outcomes_of(LocalJudge(base), conversations)
    assert too_long.kind == "too long" and "room for" in too_long.reason
    assert isinstance(first, str) and isinstance(last, str)
    short = LocalJudge(base, max_new_tokens=5)
    assert outcomes_of(short, [tiny_prompt(*solutions(1)[0])])[0].kind == "cut off"
