"""The draft model of workers elsewhere, which learns here: what it has learned is sent to them."""

from safetensors.torch import save

from tinkercloud.embedded.model.version import Version
from tinkercloud.speculative.remote.learned_weights import LearnedWeights
from tinkercloud.speculative.remote.remote_drafter import RemoteDrafter
from tinkercloud.weights.adapters import flat_params


class PushedDraft:
    """version: of the draft model, without an adapter at first, as the workers begin."""

    def __init__(self, version: Version, drafter: RemoteDrafter):
        self.version, self._drafter = version, drafter

    def use(self, version: Version) -> None:
        """version: with an adapter."""
        assert version.adapter is not None
        params = flat_params(version.adapter)
        content = save({name: t.detach().cpu().contiguous() for name, t in params.items()})
        self._drafter.push(LearnedWeights(content, version.scale))
        self.version = version
