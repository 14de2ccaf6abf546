"""Stand-ins are for machines without a GPU only: they patch PyTorch and are many times slower."""

from tinkercloud.errors import ConfigError


def refuse_cuda() -> None:
    """Raises ConfigError where there is a GPU that PyTorch can use."""
    import torch

    if torch.cuda.is_available():
        raise ConfigError(
            "--cluster-device cpu is for machines without a GPU, and this one has "
            f"{torch.cuda.device_count()} ({torch.cuda.get_device_name(0)}): leave the flag out"
        )
