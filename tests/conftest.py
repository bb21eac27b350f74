"""What every test may rely on: one thread, no network, no window, a fixed seed."""

import os

# Before torch is imported: a second thread makes tiny models slower, not faster.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings

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
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.3,  # spread enough that completions end at different lengths
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        return Policy(Qwen2ForCausalLM(config).eval(), tokenizer)

    return make


@pytest.fixture
def policy(new_policy):
    return new_policy()


@pytest.fixture
def saved_policy(new_policy, tmp_path):
    """Folder of an untrained policy on disk, as `load_policy` and a profile take it."""
    folder = tmp_path / "saved_policy"
    policy = new_policy()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder
