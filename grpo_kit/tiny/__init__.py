"""The tiny world: the shipped base model, its seven styles of solution and its six skills.

This package knows nothing of GRPO. `problems` writes solutions of word problems in styles, `skills`
puts all six skills into prompts and completions, `pretrain` trains the shipped checkpoint from a
seed, and `card` measures it. Change a text format here and the base has to be trained again, which
changes every reported result.
"""
