"""Models in the Hugging Face hub's format: a config.json and safetensors files.

`families` lists the kinds of models, `models` reads and writes config.json, `tensors` says which
tensor is which part of a parameter, `own` has the kind that holds any model of this package,
`weights` reads and writes tensors, and `folder` reads and writes a whole folder, including the
tokenizer. `rmt_tpu.load` accepts such a folder wherever it accepts a run folder, and training can
start from its weights.
"""
