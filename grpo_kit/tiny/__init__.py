"""The tiny world: where the shipped base model, its problems and its six skills come from.

This package knows nothing of GRPO. `problems` makes word problems and the styles in which the base
solves them, `skills` puts all six skills into prompts and completions, `tool_world` is the little
catalogue world of the tool questions, `pretrain` trains the shipped checkpoint from a seed and
`card` measures it. Change a text format here and the base has to be trained again, which changes
every reported result.
"""
