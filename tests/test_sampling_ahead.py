"""Sampling ahead: which weights and seeds a batch is of, its correction, and the second process."""

import copy
import dataclasses
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from toy import TASK, configure, even_ids, killed_in, weights_of, without_times

from grpo_kit import objective, training
from grpo_kit.backends import sample_groups
from grpo_kit.models import Policy, _with_lora
from grpo_kit.paths import writing
from grpo_kit.sampling_ahead import SamplingAhead
from grpo_kit.training import Learner, PromptBatches, train

CONFIG = configure(learning_rate=3e-2, importance_sampling_cap=1.2, eval_prompts=0)


def run(policy, folder, config=CONFIG, reward=even_ids, source=SamplingAhead, **options):
    where = {"output_dir": folder, "seed": 1, "batch_source": source}
    return train(policy, TASK, [reward], config, **where, **options)


@pytest.fixture(autouse=True)
def _no_process_stays():
    yield
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("changes", [{}, {"lora": 2, "bf16": True}], ids=str)
def test_a_batch_is_one_update_old(new_policy, tmp_path, monkeypatch, changes):
    """Drawn again here: the first as without sampling ahead, others with a seed and old weights."""
    changes = dict(changes)
    policy, lora = new_policy(), changes.pop("lora", 0)
    policy.model = _with_lora(policy.model, lora) if lora else policy.model
    config = dataclasses.replace(CONFIG, **changes)
    again = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    prompts = PromptBatches(again, TASK, [even_ids], config, seed=1)
    steps, given = [], []
    real_update, real_loss = Learner.update, objective.policy_loss

    def update(learner, batch, **options):
        steps.append((copy.deepcopy(policy.model.state_dict()), batch))
        return real_update(learner, batch, **options)

    def loss(logps, *, token_weights, mask, **options):
        given.append((logps.detach()[mask], token_weights[mask]))
        weights = {"token_weights": token_weights}
        return real_loss(logps, mask=mask, **weights, **options)

    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(objective, "policy_loss", loss)
    _, apart = run(policy, tmp_path, config).series("sampling/sampling_logp_difference/mean")

    generator = torch.Generator().manual_seed(1)
    own = generator  # of the first batch; the others' seeds are drawn from it
    weights, _ = steps[0]
    for (next_weights, batch), (logps, factors) in zip(steps, given, strict=True):
        again.model.load_state_dict(weights)
        places = prompts.take(2)
        expected = sample_groups(again, [prompts.prompt_ids[i] for i in places], config, own)
        assert batch.rollouts.prompt_ids == expected.prompt_ids
        assert torch.equal(batch.rollouts.completion_ids, expected.completion_ids)
        assert torch.equal(batch.rollouts.logps, expected.logps)
        own = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        weights = next_weights
        learnt = batch.rollouts.select(batch.advantages.nonzero()[:, 0])
        assert torch.equal(factors, (logps - learnt.logps[learnt.mask]).exp().clamp(max=1.2))
    assert len(steps) == 3
    assert apart[0] < (0.05 if lora else 1e-5) and min(apart[1:]) > apart[0]


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_unbroken_one(new_policy, tmp_path):
    config = configure(max_steps=4, save_steps=2, importance_sampling_cap=2.0, eval_prompts=0)
    whole_policy, policy = new_policy(), new_policy()
    whole = run(whole_policy, tmp_path / "whole", config)
    with pytest.raises(KeyboardInterrupt):
        run(new_policy(), tmp_path / "broken", config, killed_in(3))
    resumed = run(policy, tmp_path / "broken", config, resume=True)
    assert without_times(resumed.history) == without_times(whole.history)
    assert torch.equal(weights_of(policy), weights_of(whole_policy))


def test_a_process_that_was_killed_ends_the_run_in_a_sentence(policy, tmp_path):
    def deadly(**arguments):
        for process in multiprocessing.active_children():
            process.kill()
        return even_ids(**arguments)

    with pytest.raises(RuntimeError, match="exit code -9 .*: resume from the last checkpoint"):
        run(policy, tmp_path, reward=deadly)


@pytest.mark.parametrize("where", ["update", "evaluate"])
def test_no_process_outlives_an_error_whose_traceback_is_kept(policy, tmp_path, monkeypatch, where):
    def fail(*arguments, **options):
        assert multiprocessing.active_children()
        raise OSError("no space")

    place = (Learner, "update") if where == "update" else (training, "evaluate")
    monkeypatch.setattr(*place, fail)
    with pytest.raises(OSError, match="no space") as kept:
        run(policy, tmp_path, configure(eval_steps=1, eval_on_start=False))
    assert kept.traceback and not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({}, "cuda", "is for a CPU, and this policy is on 'cuda'"),
        ({"dynamic_sampling_rounds": 2}, "cpu", "dynamic_sampling_rounds is 2; .* needs 0"),
        ({"rollout_chunks": 2}, "cpu", "rollout_chunks is 2; .* needs 1"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(changes, device, message):
    policy = SimpleNamespace(device=torch.device(device))
    with pytest.raises(ValueError, match=message):
        SamplingAhead(SimpleNamespace(config=configure(**changes), policy=policy))


def test_a_script_that_its_own_process_imports_is_told_what_it_lacks(policy, tmp_path, monkeypatch):
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    message = "train under `if __name__ == '__main__':`"
    with writing(tmp_path), pytest.raises(RuntimeError, match=message):
        train(policy, TASK, [even_ids], CONFIG, output_dir=tmp_path, seed=0)
