"""Models in the Hugging Face hub's format: a config.json and safetensors files.

`families` lists the supported model types, and `own` defines a model type that fits every model of
this package. `models` reads and writes config.json. `tensors` maps tensors to slices of parameters,
and `weights` reads and writes tensors. `folder` reads and writes a whole folder, including the
tokenizer. `rmt_tpu.load` accepts such a folder wherever it accepts a run folder, and training
can start from its weights.

In this package, the *kind* of a model is its `model_type` in config.json, such as "llama".
"""
