"""TRL as a second oracle: the same tokens, masks, rewards and model given to its trainer and to us.

TRL's side is the real `GRPOTrainer` with a tiny random Qwen2: its `_compute_loss` with its fused LM
head, and its own generation step for the advantages. Our side is a plain `log_softmax(logits / T)`
and `grpo_kit.objective`. Nothing is downloaded.
"""

import math

import pytest
import torch

from grpo_kit.objective import (
    LOSS_TYPES,
    combine_rewards,
    decoupled_advantages,
    group_advantages,
    policy_loss,
    policy_loss_stats,
    truncated_importance_weights,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

N, PROMPT, LENGTH = 6, 5, 7  # completions, prompt tokens, completion tokens
VOCABULARY = 97
PAD = 0
TEMPERATURES = (1.0, 0.7)
EPSILON_HIGH = {"cispo": 1.1}  # tight, so that it bites
WEIGHTS = [1.0, 0.5]


def tiny_model(seed):
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,  # uneven distributions, so that a temperature shows
        architectures=["Qwen2ForCausalLM"],
    )
    return transformers.Qwen2ForCausalLM(config)


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(VOCABULARY - 4)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


SCORES = {"first": [], "second": []}  # what the two rewards below answer next


def first(completions, **columns):
    return SCORES["first"]


def second(completions, **columns):
    return SCORES["second"]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """One trainer a temperature, as the fused LM head is patched with it; the rest is set later."""
    made = {}
    for temperature in TEMPERATURES:
        args = trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            gradient_checkpointing=False,
            per_device_train_batch_size=N,
            gradient_accumulation_steps=1,
            num_generations=3,
            max_completion_length=LENGTH,
            temperature=temperature,
            reward_weights=WEIGHTS,
        )
        trainer = trl.GRPOTrainer(
            model=tiny_model(0),
            reward_funcs=[first, second],
            args=args,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5"] * 4}),
            processing_class=tiny_tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1  # the training loop would set it
        trainer.model.train()
        made[temperature] = trainer
    return made


@pytest.fixture(scope="module")
def rollouts():
    """Ragged completions with left-padded prompts; the pad id also stands *inside* a completion."""
    g = torch.Generator().manual_seed(3)
    prompt_ids = torch.randint(4, VOCABULARY, (N, PROMPT), generator=g)
    completion_ids = torch.randint(4, VOCABULARY, (N, LENGTH), generator=g)
    prompt_mask = torch.ones(N, PROMPT, dtype=torch.long)
    prompt_mask[3:, :2] = 0
    lengths = torch.tensor([7, 4, 1, 6, 2, 5])
    completion_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    completion_ids[3, 2] = PAD
    return {
        "prompt_ids": prompt_ids.masked_fill(prompt_mask == 0, PAD),
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids.masked_fill(completion_mask == 0, PAD),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.7, -0.5, 0.9, -1.1, 0.2]),
        "num_items_in_batch": completion_mask.sum(),
    }


def plain_logps(model, batch, temperature):
    """(N, T) log-probabilities of the completion tokens, by the textbook."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    # transformers' forward, not TRL's patched one, which reads other keywords but is the same model
    logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1].float()
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def off_policy(trainer, batch, temperature):
    """Add old and reference log-probabilities so that some ratios leave the clip range."""
    with torch.no_grad():
        now = plain_logps(trainer.model, batch, temperature)
        g = torch.Generator().manual_seed(11)
        old = now + 0.3 * torch.randn(now.shape, generator=g)
        ref = now + 0.3 * torch.randn(now.shape, generator=g)
    return {**batch, "old_per_token_logps": old, "ref_per_token_logps": ref}


def configure(trainer, loss_type, beta=0.0, level="token", correction=True):
    trainer.loss_type = loss_type
    trainer.beta = beta
    trainer.importance_sampling_level = level
    trainer.epsilon_low = 0.2
    trainer.epsilon_high = EPSILON_HIGH.get(loss_type, 0.28)
    trainer.args.use_bias_correction_kl = correction
    trainer._metrics["train"].clear()


def gradient(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def our_loss(trainer, batch, temperature, **kwargs):
    loss_type = trainer.loss_type
    return policy_loss(
        plain_logps(trainer.model, batch, temperature),
        batch["old_per_token_logps"],
        batch["advantages"],
        batch["completion_mask"],
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=EPSILON_HIGH.get(loss_type, 0.28),
        importance_sampling_level=trainer.importance_sampling_level,
        beta=trainer.beta,
        ref_logps=batch["ref_per_token_logps"],
        use_bias_correction_kl=trainer.args.use_bias_correction_kl,
        max_completion_length=LENGTH,
        num_items_in_batch=batch["num_items_in_batch"],
        **kwargs,
    )


def assert_same(trainer, theirs, ours, rtol=1e-5):
    assert ours.item() == pytest.approx(theirs.item(), rel=rtol)
    their_grad, our_grad = gradient(theirs, trainer.model), gradient(ours, trainer.model)
    assert their_grad.norm() > 1e-3
    assert (our_grad - their_grad).norm() <= rtol * their_grad.norm()


# --- loss and gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_are_trls(trainers, rollouts, loss_type, beta, level, temperature):
    trainer = trainers[temperature]
    configure(trainer, loss_type, beta, level)
    batch = off_policy(trainer, rollouts, temperature)
    theirs = trainer._compute_loss(trainer.model, batch)
    assert_same(trainer, theirs, our_loss(trainer, batch, temperature))

    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    stats = policy_loss_stats(
        plain_logps(trainer.model, batch, temperature),
        batch["old_per_token_logps"],
        batch["advantages"],
        batch["completion_mask"],
        loss_type=loss_type,
        epsilon_high=EPSILON_HIGH.get(loss_type, 0.28),
        importance_sampling_level=level,
    )
    assert stats == pytest.approx({name: logged[name] for name in stats}, rel=1e-5)
    if level == "token":
        assert max(stats.values()) > 0  # a case without clipping would show less


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_without_ratio_correction_is_trls(trainers, rollouts, level):
    trainer = trainers[1.0]
    configure(trainer, "dapo", 0.05, level, correction=False)
    batch = off_policy(trainer, rollouts, 1.0)
    theirs = trainer._compute_loss(trainer.model, batch)
    assert_same(trainer, theirs, our_loss(trainer, batch, 1.0))
    stats = policy_loss_stats(
        plain_logps(trainer.model, batch, 1.0),
        batch["old_per_token_logps"],
        batch["advantages"],
        batch["completion_mask"],
        ref_logps=batch["ref_per_token_logps"],
    )
    assert stats["kl"] == pytest.approx(trainer._metrics["train"]["kl"][-1], rel=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_first_update_without_old_logps_is_trls(trainers, rollouts, loss_type):
    trainer = trainers[0.7]
    configure(trainer, loss_type)
    batch = off_policy(trainer, rollouts, 0.7)
    theirs = trainer._compute_loss(
        trainer.model, {k: v for k, v in batch.items() if k != "old_per_token_logps"}
    )
    ours = our_loss(trainer, {**batch, "old_per_token_logps": None}, 0.7)
    their_grad = gradient(theirs, trainer.model)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-7)
    assert (gradient(ours, trainer.model) - their_grad).norm() <= 1e-5 * their_grad.norm()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up_to_trls_accumulated_loss(trainers, rollouts, loss_type):
    trainer = trainers[1.0]
    configure(trainer, loss_type, beta=0.05)
    batch = off_policy(trainer, rollouts, 1.0)
    theirs = ours = 0.0
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 3
    try:
        for rows in torch.arange(N).split(2):
            part = {k: v if v.ndim == 0 else v[rows] for k, v in batch.items()}
            theirs = theirs + trainer._compute_loss(trainer.model, part)
            loss = our_loss(trainer, part, 1.0, num_sequences_in_batch=N)
            ours = ours + (loss / 3 if loss_type == "bnpo" else loss)
    finally:
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    assert_same(trainer, theirs, ours)


def test_fully_masked_completion_counts_as_in_trl(trainers, rollouts):
    trainer = trainers[1.0]
    batch = off_policy(trainer, rollouts, 1.0)
    mask = batch["completion_mask"].clone()
    mask[1] = 0  # TRL's mask_truncated_completions
    batch |= {"completion_mask": mask, "num_items_in_batch": mask.sum()}
    for loss_type in LOSS_TYPES:
        configure(trainer, loss_type)
        theirs = trainer._compute_loss(trainer.model, batch)
        assert_same(trainer, theirs, our_loss(trainer, batch, 1.0))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_truncated_importance_sampling_is_trls(trainers, rollouts, loss_type, monkeypatch):
    trainer = trainers[1.0]
    configure(trainer, loss_type, beta=0.05)
    monkeypatch.setattr(trainer, "use_vllm", True)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_correction", True)
    batch = off_policy(trainer, rollouts, 1.0)
    old = batch["old_per_token_logps"]
    g = torch.Generator().manual_seed(4)
    rollout_logps = old + torch.randn(old.shape, generator=g)
    weights = truncated_importance_weights(old, rollout_logps, cap=2.0)
    assert (weights == 2).any() and (weights < 1).any()
    theirs = trainer._compute_loss(trainer.model, {**batch, "importance_sampling_ratio": weights})
    ours = our_loss(trainer, batch, 1.0, truncated_importance_weights=weights)
    assert_same(trainer, theirs, ours)


# --- advantages -----------------------------------------------------------------------------------


def trl_advantages(trainer, first_scores, second_scores):
    """Let TRL generate two groups of three and score them as told; return its advantages."""
    SCORES.update(first=first_scores, second=second_scores)
    prompts = [{"prompt": "w1 w2 w3"}] * 3 + [{"prompt": "w4 w5"}] * 3
    with torch.no_grad():
        return trainer._generate_and_score_completions(prompts)["advantages"]


def table(*columns):
    return torch.tensor(
        [[math.nan if x is None else x for x in row] for row in zip(*columns, strict=True)]
    )


of_two_rewards = pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0.1, -0.1, 0.1, 0.1, 0.1, -0.1]),
        ([1.0, 1.0, 1.0, 0.0, 1.0, 0.3], [0.0, 0.0, 0.0, 0.25, 0.5, 0.5]),
        ([1.0, None, 0.0, 0.5, 0.0, 1.0], [0.2, None, 0.1, 0.3, 0.4, 0.7]),
        ([1.0, None, None, 0.5, 0.0, 1.0], [0.2, None, None, 0.3, 0.4, 0.7]),
        ([None, None, None, 0.5, 0.0, 1.0], [None, None, None, 0.3, 0.4, 0.7]),
    ],
    ids=["plain", "no spread", "one unscored", "one scored", "group unscored"],
)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@of_two_rewards
def test_advantages_are_trls(trainers, scale, a, b):
    trainer = trainers[1.0]
    configure(trainer, "dapo")
    trainer.scale_rewards = scale
    theirs = trl_advantages(trainer, a, b)
    ours = group_advantages(combine_rewards(table(a, b), WEIGHTS), 3, scale)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert ours.abs().max() > 0.1


@of_two_rewards
def test_decoupled_advantages_are_trls(trainers, monkeypatch, a, b):
    trainer = trainers[1.0]
    configure(trainer, "dapo")
    monkeypatch.setattr(trainer, "multi_objective_aggregation", "normalize_then_sum")
    theirs = trl_advantages(trainer, a, b)
    ours = decoupled_advantages(table(a, b), 3, WEIGHTS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert ours.abs().max() > 0.1


def test_one_none_of_two_rewards_is_where_we_part_from_trl(trainers):
    # TRL counts it as 0 and moves the siblings; here the completion leaves its group (PITFALLS 13).
    trainer = trainers[1.0]
    configure(trainer, "dapo")
    trainer.scale_rewards = "none"
    a, b = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0], [0.4, 0.4, None, 0.0, 0.0, 0.0]
    theirs = trl_advantages(trainer, a, b)
    ours = group_advantages(combine_rewards(table(a, b), WEIGHTS), 3, "none")
    assert ours[:3].tolist() == pytest.approx([0.5, -0.5, 0.0])
    as_zero = group_advantages(combine_rewards(table(a, b).nan_to_num(0.0), WEIGHTS), 3, "none")
    torch.testing.assert_close(theirs, as_zero, rtol=0, atol=1e-6)
    assert theirs[2] != 0
