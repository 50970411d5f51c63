"""Models in and out: one file a checkpoint layout.

A layout says how a quantized weight is spread over named tensors and what the configuration beside them means; it
reads and writes QuantTensors and knows nothing of models. huggingface.py holds what the layouts of the Hugging Face
world share: directories of sharded safetensors, read one tensor at a time and written all or nothing.
"""
