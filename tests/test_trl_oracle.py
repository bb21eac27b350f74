"""TRL as a second oracle: the same tokens, masks, rewards and model given to its trainer and to us.

TRL's side is the real `GRPOTrainer` with a tiny random Qwen2: its `_compute_loss` with its fused LM
head, and its own generation step for the advantages. Our side is a plain `log_softmax(logits / T)`
and `grpo_kit.objective`.
"""

import math

import pytest
import torch
import trl
from datasets import Dataset

from grpo_kit import objective

N, PROMPT, LENGTH = 6, 5, 7  # completions, prompt tokens, completion tokens
TEMPERATURES = (1.0, 0.7)
WEIGHTS = [1.0, 0.5]
of_each_loss = pytest.mark.parametrize("loss_type", objective.LOSS_TYPES)
of_each_level = pytest.mark.parametrize("level", objective.IMPORTANCE_SAMPLING_LEVELS)


SCORES = {"first": [], "second": []}  # what the two rewards below answer next


def first(completions, **columns):
    return SCORES["first"]


def second(completions, **columns):
    return SCORES["second"]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory, new_policy):
    """One trainer a temperature, as the fused LM head is patched with it; the rest is set later."""
    trainers = {}
    for temperature in TEMPERATURES:
        args = trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to=[],
            logging_strategy="no", save_strategy="no", gradient_checkpointing=False,
            per_device_train_batch_size=N, gradient_accumulation_steps=1, num_generations=3,
            max_completion_length=LENGTH, temperature=temperature, reward_weights=WEIGHTS,
        )  # fmt: skip
        policy, data = new_policy(), Dataset.from_dict({"prompt": ["12 coins", "Mia"] * 4})
        trainer = trl.GRPOTrainer(policy.model, [first, second], args, data, None, policy.tokenizer)
        trainer.current_gradient_accumulation_steps = 1  # the training loop would set it
        trainer.model.train()
        trainers[temperature] = trainer
    return trainers


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """Ragged completions with left-padded prompts; the pad id also stands *inside* a completion."""
    g = torch.Generator().manual_seed(3)
    prompt_ids = torch.randint(10, len(tokenizer), (N, PROMPT), generator=g)
    completion_ids = torch.randint(10, len(tokenizer), (N, LENGTH), generator=g)
    pad = tokenizer.pad_token_id
    prompt_mask = torch.ones(N, PROMPT, dtype=torch.long)
    prompt_mask[3:, :2] = 0
    lengths = torch.tensor([7, 4, 1, 6, 2, 5])
    completion_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    completion_ids[3, 2] = pad
    return {
        "prompt_ids": prompt_ids.masked_fill(prompt_mask == 0, pad),
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids.masked_fill(completion_mask == 0, pad),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.7, -0.5, 0.9, -1.1, 0.2]),
        "num_items_in_batch": completion_mask.sum(),
    }


def plain_distributions(trainer, batch):
    """(N, T, V) log-probabilities at the completion tokens, by the textbook."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    # transformers' forward, not TRL's patched one, which reads other keywords but is the same model
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    return (logits.float() / trainer.temperature).log_softmax(-1)


def plain_logps(trainer, batch):
    """(N, T) log-probabilities of the completion tokens."""
    logps = plain_distributions(trainer, batch)
    return logps.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def set_up(trainer, rollouts, loss_type="dapo", beta=0.0, level="token", correction=True):
    """Tell the trainer the loss; a batch off-policy enough that some ratios leave the clips."""
    trainer.loss_type, trainer.beta, trainer.importance_sampling_level = loss_type, beta, level
    # tight, so that they bite: the mean over a sequence varies less
    trainer.epsilon_low, trainer.epsilon_high = (0.2, 0.28) if level == "token" else (0.05, 0.06)
    if loss_type == "cispo":
        trainer.epsilon_high += 0.9
    trainer.args.use_bias_correction_kl = correction
    trainer._metrics["train"].clear()
    with torch.no_grad():
        now = plain_logps(trainer, rollouts)
        g = torch.Generator().manual_seed(11)
        old, ref = (now + 0.3 * torch.randn(now.shape, generator=g) for _ in range(2))
    return {**rollouts, "old_per_token_logps": old, "ref_per_token_logps": ref}


def our_arguments(trainer, batch, **options):
    """Those of `policy_loss` and `policy_loss_stats`."""
    same = ("loss_type", "epsilon_high", "importance_sampling_level", "beta")
    return {
        "logps": plain_logps(trainer, batch), "old_logps": batch.get("old_per_token_logps"),
        "ref_logps": batch["ref_per_token_logps"], "advantages": batch["advantages"],
        "mask": batch["completion_mask"], "num_items_in_batch": batch["num_items_in_batch"],
        "max_completion_length": LENGTH, "epsilon": trainer.epsilon_low,
        "use_bias_correction_kl": trainer.args.use_bias_correction_kl,
        **{name: getattr(trainer, name) for name in same}, **options,
    }  # fmt: skip


def our_loss(trainer, batch, **options):
    return objective.policy_loss(**our_arguments(trainer, batch, **options))


def assert_same(trainer, batch, **options):
    """Compare TRL's loss of the batch, and its gradient, with ours under these options."""
    theirs, ours = trainer._compute_loss(trainer.model, batch), our_loss(trainer, batch, **options)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=0.0)
    parameters = list(trainer.model.parameters())
    gradients = (torch.autograd.grad(loss, parameters) for loss in (theirs, ours))
    their_grad, our_grad = (torch.cat([g.flatten() for g in grads]) for grads in gradients)
    assert their_grad.norm() > 1e-3
    assert (our_grad - their_grad).norm() <= 1e-5 * their_grad.norm()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@of_each_level
@pytest.mark.parametrize(("beta", "correction"), [(0.0, True), (0.05, True), (0.05, False)])
@of_each_loss
def test_loss_and_gradient_are_trls(
    trainers, rollouts, loss_type, beta, correction, level, temperature
):
    trainer = trainers[temperature]
    batch = set_up(trainer, rollouts, loss_type, beta, level, correction)
    assert_same(trainer, batch)

    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    given = our_arguments(trainer, batch)
    stats = objective.policy_loss_stats(**given)
    kl = objective.mean_kl(given["logps"], given["ref_logps"], given["mask"])
    assert stats == pytest.approx({name: logged[name] for name in stats}, rel=1e-5)
    if beta and not correction:  # else TRL logs it times the ratio
        assert kl == pytest.approx(logged["kl"], rel=1e-5)
    assert max(stats.values()) > 0  # a case without clipping would show less


@of_each_loss
def test_fully_masked_completion_counts_as_in_trl(trainers, rollouts, loss_type):
    trainer = trainers[1.0]
    mask = rollouts["completion_mask"].clone()
    mask[1] = 0  # TRL's mask_truncated_completions
    batch = set_up(trainer, rollouts, loss_type)
    assert_same(trainer, batch | {"completion_mask": mask, "num_items_in_batch": mask.sum()})


@of_each_loss
def test_truncated_importance_sampling_is_trls(trainers, rollouts, loss_type, monkeypatch):
    trainer = trainers[1.0]
    monkeypatch.setattr(trainer, "use_vllm", True)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_correction", True)
    batch = set_up(trainer, rollouts, loss_type, beta=0.05)
    old = batch["old_per_token_logps"]
    rollout_logps = old + torch.randn(old.shape, generator=torch.Generator().manual_seed(4))
    weights = objective.importance_weights(old, rollout_logps, cap=2.0)
    assert (weights == 2).any() and (weights < 1).any()
    batch["importance_sampling_ratio"] = weights
    assert_same(trainer, batch, token_weights=weights)


def test_dual_clip_is_trls(trainers, rollouts, monkeypatch):
    trainer = trainers[1.0]
    batch = set_up(trainer, rollouts, "grpo")
    monkeypatch.setattr(trainer.args, "delta", 1.3)
    assert not torch.isclose(our_loss(trainer, batch), our_loss(trainer, batch, delta=1.3))
    assert_same(trainer, batch, delta=1.3)


@of_each_loss
def test_learning_from_the_least_sure_tokens_is_trls(trainers, rollouts, loss_type, monkeypatch):
    trainer = trainers[1.0]
    batch = set_up(trainer, rollouts, loss_type, beta=0.05)
    monkeypatch.setattr(trainer, "top_entropy_quantile", 0.4)
    with torch.no_grad():
        logps = plain_distributions(trainer, batch)
    entropies = -(logps.exp() * logps).sum(-1)
    mask = batch["completion_mask"]
    chosen = objective.high_entropy(entropies, mask, 0.4)
    assert 0 < chosen.sum() < mask.sum() / 2
    assert_same(trainer, batch, token_weights=chosen.float())


def trl_advantages(trainer, first_scores, second_scores):
    """Let TRL generate two groups of three, give them these scores, and return its advantages."""
    SCORES.update(first=first_scores, second=second_scores)
    trainer.beta = 0.0  # no reference is needed
    prompts = [{"prompt": "12 coins"}] * 3 + [{"prompt": "Mia"}] * 3
    with torch.no_grad():
        return trainer._generate_and_score_completions(prompts)["advantages"]


def columns(*scores):
    return torch.tensor([[math.nan if x is None else x for x in column] for column in scores]).T


@pytest.mark.parametrize("scale", ["group", "batch", "none", "decoupled"])
@pytest.mark.parametrize(
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
def test_advantages_are_trls(trainers, monkeypatch, scale, a, b):
    trainer, rewards = trainers[1.0], columns(a, b)
    if scale == "decoupled":
        monkeypatch.setattr(trainer, "multi_objective_aggregation", "normalize_then_sum")
        ours = objective.decoupled_advantages(rewards, 3, WEIGHTS)
    else:
        monkeypatch.setattr(trainer, "scale_rewards", scale)
        ours = objective.group_advantages(objective.combine_rewards(rewards, WEIGHTS), 3, scale)
    torch.testing.assert_close(ours, trl_advantages(trainer, a, b), rtol=0, atol=1e-6)
    assert ours.abs().max() > 0.1
