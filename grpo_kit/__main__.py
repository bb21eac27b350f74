"""`python -m grpo_kit` is `grpo-kit`, for machines without make or scripts on their path."""

from grpo_kit.cli import app

app()
