"""The bodies of SGLang's `/generate`: whose prefix cache they use."""

import numpy as np
from numpy.typing import NDArray

from tinkercloud.cluster.rollout.generate import Body, Served, sample_bodies, target_bodies
from tinkercloud.core.types import SampleRequest, SamplingParams

PROMPT: NDArray[np.int32] = np.arange(5, dtype=np.int32)
TARGETS: NDArray[np.int64] = np.arange(4, dtype=np.int64)[:, None]


def bodies(salt: str) -> list[Body]:
    request = SampleRequest(
        PROMPT,
        2,
        SamplingParams(max_tokens=3, seed=0),
        target_prompt_logprobs=TARGETS,
        cache_salt=salt,
    )
    served = Served(64, (2,))
    return [*sample_bodies(request, None, served), *target_bodies(request, None, served)]


def test_all_bodies_of_a_salt_have_one_key_and_those_of_another_salt_another() -> None:
    ann, bob = ({body["extra_key"] for body in bodies(salt)} for salt in ("ann", "bob"))
    assert len(bodies("ann")) == 3
    assert len(ann) == len(bob) == 1
    assert ann != bob
    assert not any("ann" in key for key in ann), "an engine's log does not name users"


def test_without_a_salt_the_prefix_cache_is_everyones() -> None:
    assert not any("extra_key" in body for body in bodies(""))
