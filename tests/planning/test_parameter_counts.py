"""The planner's count of parameters against `transformers`, built without memory."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.planning.public_configs import NAMES, public_config
from tinkercloud.planning.model_table import read_shape


def _known_to_transformers(name: str) -> int:
    """Parameters and saved buffers (DeepSeek's balancing bias is one), each tied one once."""
    figures = public_config(name)
    figures.pop("quantization_config", None)
    kind = figures.pop("model_type")
    config = AutoConfig.for_model(kind, **figures)
    if hasattr(config, "vision_config"):
        config = config.text_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    buffers = (b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in [*model.parameters(), *buffers])


@pytest.mark.parametrize("name", NAMES)
def test_transformers_counts_the_same_parameters(name):
    assert read_shape(public_config(name)).parameters == _known_to_transformers(name)
