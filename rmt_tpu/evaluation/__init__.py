"""What a model knows: tasks of lm-evaluation-harness and perplexity of texts.

A `Scorer` answers requests in tokens, `documents` makes them of tasks (`tasks`) and texts,
`evaluate` asks and keeps the answers, `metrics` says what they come to, `report` tells it.
"""
