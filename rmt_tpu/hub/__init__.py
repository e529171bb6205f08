"""Models of the Llama family in the Hugging Face hub's format: a config.json and safetensors files.

`models` reads and writes config.json, `weights` reads and writes the tensors, and `folder` reads
and writes a whole folder, including the tokenizer. `rmt_tpu.load` accepts such a folder wherever it
accepts a run folder, and training can start from its weights.
"""
