"""The judge behind HTTP: a server on loopback that fails in every way, and `transformers serve`."""

import contextlib
import hashlib
import json
import logging
import re
import shutil
import socket
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from injections import PERFECT
from test_in_both_trainers import TEXTS
from test_judge import outcomes_of, response_in, rewards_of

from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir
from grpo_kit.rewards import EndpointJudge, LocalJudge, QualityJudgeReward
from grpo_kit.rewards.judge import Failure, quality_prompt, tiny_prompt
from grpo_kit.rewards.judge.texts import CRITERIA

pytest.importorskip("openai", reason="the judge extra is not installed: pip install -e '.[judge]'")

KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def judgement_of(prompt: str) -> list[int]:
    """Four scores from a digest of the prompt; never of mean 3, whose reward is 0."""
    digest = hashlib.sha256(prompt.encode()).digest()
    values = [1 + byte % 5 for byte in digest[:4]]
    return [*values[:3], values[3] % 5 + 1] if sum(values) == 12 else values


def expected(prompt: str) -> float:
    return (sum(judgement_of(prompt)) / 4 - 1) / 4 - 0.5


def completion(content: str | None, finish_reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": content}
    body = {
        "id": "1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }  # fmt: skip
    return json.dumps(body).encode()


class Server:
    """An OpenAI-compatible endpoint on loopback.

    `fault(n, body)` names what goes wrong with the n-th request, or None.
    """

    def __init__(self):
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    n = len(owner.requests)
                    owner.requests.append(body)
                    owner.headers.append({k.lower(): v for k, v in self.headers.items()})
                    owner.at_once += 1
                    owner.most_at_once = max(owner.most_at_once, owner.at_once)
                time.sleep(owner.delay)
                with owner.lock:  # before the answer, after which the client may ask anew
                    owner.at_once -= 1
                with contextlib.suppress(OSError):  # the client has given up
                    owner.answer(self, owner.fault(n, body), body)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.lock, self.delay, self.fault = threading.Lock(), 0.0, lambda n, body: None
        self.requests, self.headers, self.at_once, self.most_at_once = [], [], 0, 0
        self.elsewhere = ""
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def failing(self, fault) -> str:
        """The address, where from now on `fault` goes wrong."""
        self.fault = fault if callable(fault) else lambda n, body: fault
        return self.url

    def answer(self, handler, fault: str | None, body: dict) -> None:
        values = judgement_of(body["messages"][-1]["content"])
        good = json.dumps(dict(zip(CRITERIA, values, strict=True)))
        bodies = {
            None: completion(good),
            "a web page": b"<html>\xff</html>",
            "no choices": b'{"choices": []}',
            "empty": completion(None),
            "cut off": completion(good[:20], finish_reason="length"),
            "key in reply": completion(good[:-1] + f', "rationale": "{KEY}"}}'),
            "drip": b" " * 100,
        }
        if fault == "timeout":
            time.sleep(3.0)
        elif fault == "cut":
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            status = fault if fault not in bodies else "200"
            message = f"{fault} for {handler.headers['Authorization']}"
            data = bodies.get(fault, json.dumps({"error": {"message": message}}).encode())
            handler.send_response(int(status))
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(data)))
            if status.startswith("3"):
                handler.send_header("Location", f"{self.elsewhere}/chat/completions")
            handler.end_headers()
            for piece in [data] if fault != "drip" else [b" "] * len(data):
                handler.wfile.write(piece)
                handler.wfile.flush()
                time.sleep(0.1 * (fault == "drip"))


@pytest.fixture
def server():
    with contextlib.closing(Server()) as server:
        yield server


def judge_at(url: str, **options) -> EndpointJudge:
    """Patient, so that a busy machine does not make time-outs of its own."""
    options = {"api_key_env": "JUDGE_KEY", "timeout": 60.0, "max_retries": 0} | options
    return EndpointJudge("m", base_url=url, **options)


def outcome_of(judge, response: str = "15"):
    return outcomes_of(judge, [judge.prompt("How many?", response)])[0]


def test_the_endpoint_gets_the_whole_prompt_and_its_reply_is_scored(server):
    response = "15 — fünfzehn " + "words " * 20_000
    rewards = rewards_of(QualityJudgeReward(judge_at(server.url)), [response, "16"])
    prompts = [quality_prompt("How many?", r) for r in (response, "16")]
    assert rewards == [expected(prompt[0]["content"]) for prompt in prompts]
    assert [request["messages"] for request in server.requests] in (prompts, prompts[::-1])
    assert {(request["model"], request["temperature"]) for request in server.requests} == {("m", 0)}
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}


def test_replies_belong_to_their_conversations_and_share_the_limit_of_calls_at_a_time(server):
    reward = QualityJudgeReward(judge_at(server.url, concurrency=2))
    server.delay = 0.05
    for loop in range(2):  # event loops that follow each other
        texts = [f"{loop}-{i}" for i in range(9)]
        wanted = [expected(quality_prompt("How many?", text)[0]["content"]) for text in texts]
        assert rewards_of(reward, texts) == wanted
    assert 1 < server.most_at_once <= 2


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("timeout", "timeout", "raise timeout=0.5 or lower"),
        ("drip", "timeout", "raise timeout"),  # each byte comes in time, the whole does not
        ("429", "rate limit", "lower concurrency"),
        ("500", "HTTP 500", "500 for Bearer .*: look at"),
        ("403", "key refused", "set a valid one as JUDGE_KEY"),
        ("404", "HTTP 404", "Error code: 404 .*: look at the server.s log"),
        ("401", "key refused", "Error code: 401 .*: set a valid one as JUDGE_KEY"),
        ("cut", "unreachable", "start the server or correct base_url"),
        *((fault, "no completion", "/v1") for fault in ("a web page", "no choices")),
        ("empty", "empty", "ended by 'stop' without text"),
        ("cut off", "cut off", "limit of tokens: raise it"),
    ],
)
def test_every_fault_is_a_failure_that_says_what_to_do(fault, kind, message, server):
    url = server.failing(fault)
    outcome = outcome_of(judge_at(url, timeout=0.5 if kind == "timeout" else 60.0))
    assert isinstance(outcome, Failure) and outcome.kind == kind
    assert re.search(message, outcome.reason), outcome.reason
    assert KEY not in outcome.reason


def test_an_endpoint_that_leads_elsewhere_is_not_followed(server):
    with contextlib.closing(Server()) as other:
        url, server.elsewhere = server.failing("308"), other.url
        assert outcome_of(judge_at(url)).kind == "HTTP 308"
        assert not other.requests and len(server.requests) == 1


@pytest.mark.parametrize("fault", ["500", "429", "cut"])
def test_what_may_pass_is_tried_again(fault, server):
    url = server.failing(lambda n, body: [fault, None, "500", "500"][n])
    judge = judge_at(url, max_retries=1)
    assert isinstance(outcome_of(judge), str)
    assert outcome_of(judge).kind == "HTTP 500" and len(server.requests) == 4, "bounded"


def test_a_missing_key_is_named_before_any_call(monkeypatch):
    for wrong in (" \n", "two words", "two\nlines", "schlüssel"):
        monkeypatch.setenv("JUDGE_KEY", wrong)
        with pytest.raises(ValueError, match="JUDGE_KEY is not set, or no ASCII") as caught:
            judge_at("http://127.0.0.1:1/v1")
        assert not wrong.strip() or wrong not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": None}, "base_url must be like http://127.0.0.1:8000/v1"),
        ({"url": "http://me:secret@host/v1"}, "keys come from the environment only"),
        ({"url": "http://127.0.0.1:1/v1", "concurrency": 0}, "concurrency=0: give 1"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        judge_at(**options)
    assert "secret" not in str(caught.value)


def test_the_key_is_nowhere_but_in_the_request(tmp_path, caplog, server):
    """The server repeats it in its errors and in a judgement."""
    caplog.set_level(logging.DEBUG)
    faults = ["400", "401", "500", "key in reply", "cut", "a web page", None]
    by_response = faults + ["401"] * 100
    server.fault = lambda n, body: by_response[int(response_in(body["messages"][-1]["content"]))]
    reward = QualityJudgeReward(judge_at(server.url, concurrency=1), cache_dir=tmp_path)
    rewards = rewards_of(reward, [str(i) for i in range(len(faults))])
    with pytest.raises(RuntimeError) as caught:
        rewards_of(reward, [str(i) for i in range(100)])
    assert [r is None for r in rewards] == [True, True, True, False, True, True, False]
    assert KEY in server.headers[0]["authorization"]
    messages = "".join(traceback.format_exception(caught.value))
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert "401 for Bearer" in messages and "judgements failed" in caplog.text
    assert b"[key]" in stored
    kept = repr(vars(reward)) + repr(vars(reward.judge)) + repr(rewards)
    assert KEY not in messages + caplog.text + kept and KEY.encode() not in stored


RESPONSES = [*TEXTS[:2], f"<think>12+7=19.</think>{PERFECT}"]
QUESTION = "Mia has 12 coins. First, Mia finds 7. How many coins does Mia have?"


@pytest.mark.slow
def test_the_tiny_base_judges_behind_transformers_serve(served, tmp_path):
    """Its replies are those of the same weights in this process."""
    folder = tmp_path / "judge"
    shutil.copytree(data_dir() / "tiny-base", folder)
    # The server parses a Qwen2's reply by Qwen's chat template, unless told what another looks like
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["response_template"] = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {"content": {"close": "<|end|>", "content": "text"}},
    }
    path.write_text(json.dumps(config))
    options = {"base_url": served, "api_key_env": None, "prompt": tiny_prompt}
    judge = EndpointJudge(str(folder), **options, timeout=60)
    conversations = [tiny_prompt(QUESTION, response) for response in RESPONSES]
    local = LocalJudge(load_policy(folder, dtype="bfloat16"))
    replies = [outcomes_of(one, conversations) for one in (judge, local)]
    assert replies[0] == replies[1]
    rewards = rewards_of(QualityJudgeReward(judge), RESPONSES[:2])
    assert all(-0.5 <= value <= 0.5 for value in rewards)
