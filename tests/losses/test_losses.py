"""Each loss and its gradient against loops over plain Python floats, and against hand-made numbers.

The reference gives the value and, by the formulas of the wire specification, the derivative by
the log-probabilities; finite differences check those formulas where no stop-gradient is in them.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from tinkercloud.errors import InvalidRequest
from tinkercloud.losses import LOSSES, load_loss

Values = list[float]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
RL = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")


def clip(x: float, config: Mapping[str, float]) -> float:
    return min(max(x, config["clip_low_threshold"]), config["clip_high_threshold"])


def surrogate(r: float, a: float, config: Mapping[str, float]) -> tuple[float, float]:
    """(-min(r a, clip(r) a), its derivative by log r)."""
    plain, clipped = r * a, clip(r, config) * a
    active = plain <= clipped
    return -min(plain, clipped), -plain if active else 0.0


def truncated(delta: float, a: float, config: Mapping[str, float]) -> tuple[float, float]:
    """The loss of stable_reinforce at one sampled token, and its derivative by log r."""
    c, k = config["clip_high_threshold"], config["kl_coeff"]
    r = math.exp(delta)
    g = r if r <= c else c * (1 + math.log(r / c))
    return -g * a + k * (g - 1 - delta), -min(r, c) * a + k * (min(r, c) - 1)


def reference(name: str, p: Values, inputs: Mapping[str, Values], config: Mapping[str, float]):
    """(elementwise loss, derivative of their sum by p), one token after the other."""
    if name == "cross_entropy":
        pairs = [(-w * x, -w) for x, w in zip(p, inputs["weights"], strict=True)]
        return [list(column) for column in zip(*pairs, strict=True)]
    q, advantages = inputs["logprobs"], inputs["advantages"]
    if name == "gspo":
        chosen = [i for i, m in enumerate(inputs["sequence_ratio_mask"]) if m != 0]
        mean = sum(p[i] - q[i] for i in chosen) / len(chosen)
        pairs = [surrogate(math.exp(mean), a, config) for a in advantages]
        return [list(column) for column in zip(*pairs, strict=True)]
    pairs = []
    sampled = inputs.get("sampled_mask", advantages)
    for x, y, a, m in zip(p, q, advantages, sampled, strict=True):
        r = math.exp(x - y)
        if name == "stable_reinforce":
            pairs.append(truncated(x - y, a, config) if a or (m and config["kl_coeff"]) else (0, 0))
        elif a == 0:
            pairs.append((0.0, 0.0))
        elif name == "importance_sampling":
            pairs.append((-r * a, -r * a))
        elif name == "ppo":
            pairs.append(surrogate(r, a, config))
        elif name == "cispo":
            pairs.append((-clip(r, config) * x * a, -clip(r, config) * a))
        else:
            beta = config["beta"]
            pairs.append((-(x * a - 0.5 * beta * (x - y) ** 2), -(a - beta * (x - y))))
    return [list(column) for column in zip(*pairs, strict=True)]


def ours(
    name: str,
    p: Sequence[float],
    inputs: Mapping[str, Sequence[float]],
    config: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(elementwise loss, gradient of its sum)."""
    logprobs = torch.tensor(p, dtype=dtype, requires_grad=True)
    tensors = {key: torch.tensor(value, dtype=dtype) for key, value in inputs.items()}
    value = load_loss(name)(logprobs, tensors, LOSSES[name].defaults if config is None else config)
    value.sum().backward()
    assert logprobs.grad is not None
    return value.detach(), logprobs.grad


def random_datum(name: str, seed: int, num_tokens: int = 40) -> tuple[Values, dict[str, Values]]:
    """Ratios from about 0.3 to 3, advantages of both signs, a few exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, num_tokens, generator=generator, dtype=torch.float64)
    p = -noise[0].abs() - 0.01
    q, advantages = p - 0.4 * noise[1], noise[2]
    advantages[::7] = 0
    if name == "cross_entropy":
        return p.tolist(), {"weights": advantages.tolist()}
    inputs = {"logprobs": q.tolist(), "advantages": advantages.tolist()}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = (noise[3] > -0.5).double().tolist()
    if name == "stable_reinforce":
        inputs["sampled_mask"] = (torch.arange(num_tokens) % 14 > 0).double().tolist()
        inputs["advantages"] = (advantages * torch.tensor(inputs["sampled_mask"])).tolist()
    return p.tolist(), inputs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_reference_loop(name, seed):
    p, inputs = random_datum(name, seed)
    value, gradient = ours(name, p, inputs)
    expected, slope = reference(name, p, inputs, LOSSES[name].defaults)
    assert value.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert gradient.tolist() == pytest.approx(slope, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_stays_near_the_reference_loop(name):
    p, inputs = random_datum(name, seed=8)
    value, gradient = ours(name, p, inputs, dtype=torch.float32)
    expected, slope = reference(name, p, inputs, LOSSES[name].defaults)
    assert value.dtype == gradient.dtype == torch.float32
    assert value.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert gradient.tolist() == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "name", ["cross_entropy", "importance_sampling", "ppo", "dro", "stable_reinforce"]
)
def test_gradient_equals_finite_differences(name):
    p, inputs = random_datum(name, seed=21)
    _, gradient = ours(name, p, inputs)
    step = 1e-6
    for i in range(len(p)):
        up, down = ([x + sign * step * (i == j) for j, x in enumerate(p)] for sign in (1, -1))
        difference = ours(name, up, inputs)[0].sum() - ours(name, down, inputs)[0].sum()
        assert gradient[i].item() == pytest.approx(difference.item() / (2 * step), abs=1e-6)


@pytest.mark.parametrize("name", RL)
def test_the_first_gradient_on_policy_is_minus_the_advantage(name):
    advantages = [1.5, -2.0, 0.25]
    p = [-1.0, -0.5, -3.0]
    inputs = {"logprobs": p, "advantages": advantages}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = [1.0, 1.0, 1.0]
    if name == "stable_reinforce":
        inputs["sampled_mask"] = [1.0, 1.0, 1.0]
    _, gradient = ours(name, p, inputs)
    assert gradient.tolist() == pytest.approx([-a for a in advantages])


@pytest.mark.parametrize("name", RL)
def test_a_token_without_advantage_adds_nothing_even_where_the_ratio_overflows(name):
    inputs = {"logprobs": [-3000.0, -1.0], "advantages": [0.0, 1.0]}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = [0.0, 1.0]
    if name == "stable_reinforce":
        inputs["sampled_mask"] = [0.0, 1.0]
    value, gradient = ours(name, [-1.0, -1.0], inputs, dtype=torch.float32)
    assert value[0] == 0 and gradient[0] == 0
    assert value.isfinite().all() and gradient[1] == -1


def test_cross_entropy_by_hand():
    value, gradient = ours(
        "cross_entropy", [-1.0, -2.0, -3.0, -4.0], {"weights": [1.0, 0.5, -2.0, 0.0]}
    )
    assert value.tolist() == [1.0, 1.0, -6.0, 0.0]
    assert gradient.tolist() == [-1.0, -0.5, 2.0, 0.0]


def test_cross_entropy_takes_alternative_targets():
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    weights = torch.tensor([[0.75, 0.25], [0.5, -0.5]])
    value = load_loss("cross_entropy")(logprobs, {"weights": weights}, {})
    value.sum().backward()
    assert value.tolist() == [[0.75, 0.5], [1.5, -2.0]]
    assert torch.equal(logprobs.grad, -weights)


def test_cross_entropy_ignores_impossible_targets_of_weight_zero():
    value, gradient = ours("cross_entropy", [-math.inf, -1.0], {"weights": [0.0, 1.0]})
    assert value.tolist() == [0.0, 1.0]
    assert gradient.tolist() == [0.0, -1.0]


def test_importance_sampling_by_hand():
    value, gradient = ours(
        "importance_sampling",
        [math.log(0.5), math.log(0.2)],
        {"logprobs": [math.log(0.25), math.log(0.4)], "advantages": [3.0, -1.0]},
    )
    assert value.tolist() == pytest.approx([-6.0, 0.5])
    assert gradient.tolist() == pytest.approx([-6.0, 0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # risen enough: no more push
        (1.5, -2.0, 3.0, 3.0),  # risen although bad: pushed down in full
        (0.5, 2.0, -1.0, -1.0),  # fallen although good: pushed up in full
        (0.5, -2.0, 1.6, 0.0),  # fallen enough
    ],
)
def test_ppo_and_gspo_clip_by_hand(ratio, advantage, value, slope):
    p, inputs = [math.log(ratio) - 2.0], {"logprobs": [-2.0], "advantages": [advantage]}
    for name, more in (("ppo", {}), ("gspo", {"sequence_ratio_mask": [1.0]})):
        loss, gradient = ours(name, p, inputs | more)
        assert loss.item() == pytest.approx(value)
        assert gradient.item() == pytest.approx(slope)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_ppo_at_a_bound_has_the_whole_gradient(advantage, bound):
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    # The logarithm is chosen so that exp gives the bound exactly.
    p = math.log(bound)
    assert torch.tensor(p, dtype=torch.float64).exp().item() == bound
    loss, gradient = ours("ppo", [p], {"logprobs": [0.0], "advantages": [advantage]}, config)
    assert loss.item() == -bound * advantage
    assert gradient.item() == pytest.approx(-bound * advantage)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_the_thresholds_of_the_request_are_used(name):
    p, inputs = random_datum(name, seed=2)
    config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}
    value, gradient = ours(name, p, inputs, config)
    expected, slope = reference(name, p, inputs, config)
    assert value.tolist() == pytest.approx(expected)
    assert gradient.tolist() == pytest.approx(slope)
    assert not torch.allclose(value, ours(name, p, inputs)[0])


def test_cispo_learns_from_clipped_tokens_with_the_clipped_weight():
    inputs = {"logprobs": [-4.0, -1.0], "advantages": [2.0, -1.0]}
    value, gradient = ours("cispo", [-1.0, -1.5], inputs)
    assert value.tolist() == pytest.approx([4.0 * 2.0, -math.exp(-0.5) * 1.5])
    assert gradient.tolist() == pytest.approx([-4.0 * 2.0, math.exp(-0.5)])


def test_cispo_has_no_gradient_through_the_ratio():
    p, inputs = random_datum("cispo", seed=5)
    _, gradient = ours("cispo", p, inputs)
    weights = [
        -clip(math.exp(x - y), LOSSES["cispo"].defaults) * a
        for x, y, a in zip(p, inputs["logprobs"], inputs["advantages"], strict=True)
    ]
    assert gradient.tolist() == pytest.approx(weights)


def test_dro_by_hand_with_its_beta():
    inputs = {"logprobs": [-2.0, -1.0], "advantages": [1.0, -0.5]}
    value, gradient = ours("dro", [-1.0, -3.0], inputs, {"beta": 0.2})
    assert value.tolist() == pytest.approx([1.0 + 0.1, -1.5 + 0.4])
    assert gradient.tolist() == pytest.approx([-1.0 + 0.2, 0.5 - 0.4])


def test_dro_rests_where_the_ratio_answers_the_advantage():
    # The minimum over l of -(l A - beta / 2 (l - q)^2) is at l = q + A / beta.
    _, gradient = ours("dro", [-3.0 + 0.1 / 0.05], {"logprobs": [-3.0], "advantages": [0.1]})
    assert gradient.item() == pytest.approx(0.0, abs=1e-12)


def test_gspo_by_hand_uses_the_mean_over_the_mask_for_every_token():
    p, q = [-1.0, -1.0, -9.0, -2.0], [-1.2, -1.0, 0.0, -2.1]
    inputs = {
        "logprobs": q,
        "advantages": [1.0, 1.0, 0.0, -1.0],
        "sequence_ratio_mask": [1.0, 1.0, 0.0, 1.0],
    }
    ratio = math.exp((0.2 + 0.0 + 0.1) / 3)
    value, gradient = ours("gspo", p, inputs)
    assert value.tolist() == pytest.approx([-ratio, -ratio, 0.0, ratio])
    assert gradient.tolist() == pytest.approx([-ratio, -ratio, 0.0, ratio])


def test_gspo_reads_its_mask_as_a_choice_not_as_weights():
    p, inputs = random_datum("gspo", seed=6)
    scaled = inputs | {"sequence_ratio_mask": [-2.5 * m for m in inputs["sequence_ratio_mask"]]}
    assert torch.equal(ours("gspo", p, inputs)[0], ours("gspo", p, scaled)[0])


def test_gspo_with_an_empty_mask_has_the_ratio_one():
    inputs = {
        "logprobs": [-2.0, -3.0],
        "advantages": [1.0, -2.0],
        "sequence_ratio_mask": [0.0, 0.0],
    }
    value, gradient = ours("gspo", [-1.0, -1.0], inputs)
    assert value.tolist() == gradient.tolist() == [-1.0, 2.0]


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(InvalidRequest, match=r"'unheard_of'.*cross_entropy"):
        load_loss("unheard_of")


STABLE = {"clip_high_threshold": 2.0, "kl_coeff": 0.0}


@pytest.mark.parametrize("kl_coeff", [0.0, 0.3])
def test_stable_reinforce_with_a_kl_term_equals_the_reference_and_finite_differences(kl_coeff):
    config = STABLE | {"kl_coeff": kl_coeff}
    p, inputs = random_datum("stable_reinforce", seed=4)
    p = [x + 1.5 * (i % 3 == 0) for i, x in enumerate(p)]  # ratios on both sides of the bound
    value, gradient = ours("stable_reinforce", p, inputs, config)
    expected, slope = reference("stable_reinforce", p, inputs, config)
    assert value.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert gradient.tolist() == pytest.approx(slope, rel=1e-12, abs=1e-14)
    step = 1e-6
    for i in range(len(p)):
        up, down = ([x + sign * step * (i == j) for j, x in enumerate(p)] for sign in (1, -1))
        ups, downs = (ours("stable_reinforce", q, inputs, config)[0].sum() for q in (up, down))
        assert gradient[i].item() == pytest.approx((ups - downs).item() / (2 * step), abs=1e-6)


@pytest.mark.parametrize("delta", [-80.0, -5.0, 0.0, 5.0, 80.0, 3000.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_gradient_of_stable_reinforce_is_bounded_however_far_the_policy_drifted(
    delta, advantage
):
    inputs = {"logprobs": [-1.0 - delta], "advantages": [advantage], "sampled_mask": [1.0]}
    config = STABLE | {"kl_coeff": 0.1}
    value, gradient = ours("stable_reinforce", [-1.0], inputs, config, dtype=torch.float32)
    assert value.isfinite().all()
    assert abs(gradient.item()) <= 2.0 * abs(advantage) + 0.1 * 1.0 + 1e-6


@pytest.mark.parametrize("bound", [1.0, 0.5, 2.0])
def test_at_its_bound_stable_reinforce_has_the_gradient_of_the_bound(bound):
    inputs = {"logprobs": [0.0], "advantages": [1.0], "sampled_mask": [1.0]}
    config = {"clip_high_threshold": bound, "kl_coeff": 0.0}
    _, gradient = ours("stable_reinforce", [math.log(bound)], inputs, config)
    assert gradient.item() == pytest.approx(-bound, rel=1e-12)


def test_the_kl_term_of_stable_reinforce_pulls_sampled_tokens_to_the_sampler_and_no_others():
    inputs = {
        "logprobs": [-2.0, -2.0, -2.0],
        "advantages": [0.0, 0.0, 0.0],
        "sampled_mask": [1.0, 1.0, 0.0],
    }
    _, gradient = ours("stable_reinforce", [-1.5, -2.5, -1.0], inputs, STABLE | {"kl_coeff": 1.0})
    assert gradient[0] > 0 > gradient[1]  # down from above, up from below
    assert gradient[2] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_losses_do_not_change_their_inputs(name):
    p, inputs = random_datum(name, seed=1)
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    before = {key: value.clone() for key, value in tensors.items()}
    function: Callable = load_loss(name)
    function(torch.tensor(p, requires_grad=True), tensors, LOSSES[name].defaults)
    assert all(torch.equal(before[key], tensors[key]) for key in before)
