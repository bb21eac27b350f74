"""grpo_kit: Group Relative Policy Optimization, small enough to read, tested against oracles."""
