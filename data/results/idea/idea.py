"""What does it cost to pay for short answers? `grpo-kit compare idea.py --set max_steps=50`."""

from grpo_kit.rewards import accuracy_reward


def shorter(price):
    """A reward that takes `price` off for each token."""

    def short(completion_ids, **columns):
        return [-price * len(ids) for ids in completion_ids]

    return short


arms = {
    "accuracy": {"rewards": [accuracy_reward]},
    "0.01 a token": {"rewards": [accuracy_reward, shorter(0.01)]},
    "0.1 a token": {"rewards": [accuracy_reward, shorter(0.1)]},
}
