"""Qwen2 and Qwen2.5 dense (`Qwen2ForCausalLM`): Llama with biases on q, k and v.

The biases are in the config (`attention_bias`) and applied by the Context's `linear`.
"""

from tinkercloud.architectures.llama import Llama


class Qwen2(Llama):
    pass
