"""The tiny world: the shipped base model, its seven styles of solution and its six skills.

Nothing here knows GRPO. Change a text format and the base has to be trained again, which changes
every reported result.
"""
