"""Models of Llama's family in the hub's form: a folder of config.json and safetensors.

`models` reads and writes config.json, `weights` the tensors, and `folder` both together with a
tokenizer. A folder opens wherever a run folder does (`rmt_tpu.load`), and a run can start from one.
"""
