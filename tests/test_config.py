"""Every number of a run: what cannot run is refused, naming field, value and limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import configure


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1; .* 2"),
        ({"loss_type": "ppo"}, "loss_type is 'ppo'; .*'grpo', 'bnpo', 'dapo', 'dr_grpo' or 'cisp"),
        ({"loss_type": "cispo"}, "'cispo' needs epsilon_high"),
        ({"scale_rewards": "std"}, "scale_rewards is 'std'; .*'group', 'batch', 'none'"),
        (
            {"baseline": "batch", "multi_objective_aggregation": "normalize_then_sum"},
            "baseline is 'batch', but 'normalize_then_sum' compares in groups: choose",
        ),
        ({"reward_weights": (0.0, 0.0)}, r"reward_weights are \(0.0, 0.0\).* give one"),
        ({"generation_batch_size": 10}, r"size is 10; .* multiple of num_generations \(4\)"),
        ({"per_device_train_batch_size": 3}, r"size is 8; .* multiple of per_device.* \(3\)"),
        ({"delta": 1.2}, r"delta is 1.2; the clip already ends at 1.2: give more"),
        ({"delta": 9.0, "loss_type": "cispo", "epsilon_high": 5.0}, "delta is 9.0, but 'cispo'"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0; .* greater than 0"),
        ({"top_p": 0.9}, "top_p is 0.9; .* 1"),
        ({"temperature": 0.0}, "temperature is 0.0; .* 0"),
        ({"temperature": float("inf")}, "temperature is inf; .* finite"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0; .* 0"),  # it would turn the update round
        ({"max_steps": "many"}, "max_steps is 'many'; .* integer"),
        ({"max_generated_tokens": 9, "lr_scheduler_type": "linear"}, "'linear'.* use 'constant'"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type is 'greedy'; .*'linear', 'cosine'"),
        ({"learning_rat": 0.1}, "learning_rat is 0.1; GRPOConfig has no such field"),
    ],
)
def test_a_config_that_cannot_run_says_why(changes, message):
    with pytest.raises(ValueError, match=message):
        configure(**changes)


@given(processes=st.integers(1, 8), rows=st.integers(1, 32), passes=st.integers(1, 12))
def test_an_optimiser_step_has_as_many_completions_whoever_shares_them(processes, rows, passes):
    batch = {"num_generations": 2, "generation_batch_size": 2 * rows * passes}
    batch |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": passes}
    config = configure(**batch)
    if (rows * passes) % processes:
        with pytest.raises(ValueError, match=f"{processes} processes cannot share the"):
            config.shared_by(processes)
        return
    device, accumulated = config.shared_by(processes)
    assert device * accumulated * processes == rows * passes
    assert device <= rows, "no more memory than one process needs"
    assert config.shared_by(1) == (rows, passes)
