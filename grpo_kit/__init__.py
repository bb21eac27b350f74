"""grpo_kit: Group Relative Policy Optimization, small enough to read and tested against exact oracles."""
