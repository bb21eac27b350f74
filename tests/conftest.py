"""What every test may rely on: one thread, no network, no window, a fixed seed."""

import gzip
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

# Before torch is imported: a second thread makes tiny models slower, not faster.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from browser import Browser
from hypothesis import settings

from grpo_kit.paths import data_dir

CHECKOUT = Path(__file__).resolve().parents[1]

# on a busy machine a deadline fails tests for their timing, not their outcome
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    import torch  # here, as the process that only hands out tests to others needs none

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer():
    """The tiny world's tokenizer, trained on few texts."""
    from grpo_kit.tiny.pretrain import make_tokenizer

    return make_tokenizer(seed=0, n_conversations=300)


@pytest.fixture(scope="session")
def new_policy(tokenizer):
    """Make an untrained policy of 2 small layers; the same weights for the same seed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo_kit.models import Policy

    def make(seed: int = 0) -> Policy:
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
            initializer_range=0.3,  # spread enough that completions end at different lengths
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )  # fmt: skip
        return Policy(Qwen2ForCausalLM(config).eval(), tokenizer)

    return make


@pytest.fixture
def policy(new_policy):
    return new_policy()


@pytest.fixture(scope="session")
def base():
    """The shipped policy; a test that trains it loads its own."""
    from grpo_kit.profiles import PROFILES

    return PROFILES["tiny"].load_policy()


@pytest.fixture
def saved_policy(new_policy, tmp_path):
    """Folder of an untrained policy on disk, as `load_policy` and a profile take it."""
    from grpo_kit.models import save_policy

    return save_policy(new_policy(), tmp_path / "saved_policy")


@pytest.fixture(scope="session")
def run_python():
    """Run code in a Python process of its own; what it prints."""

    def run(code: str, **environment: str) -> str:
        options = {"capture_output": True, "text": True, "timeout": 600}
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **environment}
        done = subprocess.run([sys.executable, "-c", code], env=environment, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    """A port on loopback that nobody listens at."""
    return _free_port()


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The address of `transformers serve`; a model is loaded when a request names its folder."""
    port = _free_port()
    command = [
        str(Path(sys.executable).with_name("transformers")),
        "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("served") / "log"
    with open(log, "w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(900):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser")))
    chromium = next(found, None) or pytest.skip("needs Chromium")
    browser = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.process.terminate()
    browser.process.wait(timeout=30)


@pytest.fixture(scope="session")
def gsm8k_folder(tmp_path_factory) -> Path:
    """The shipped GSM8K rows, unpacked."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for packed in (data_dir() / "gsm8k").glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder
