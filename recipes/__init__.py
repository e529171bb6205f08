"""One absl program per job: `python -m recipes.NAME --flags`. Flags to a config to a function."""
