"""The recipes: one absl program per job, run with `python -m recipes.NAME --flags`.

Each one makes a config from its flags and passes it to a function of `rmt_tpu`.
"""
