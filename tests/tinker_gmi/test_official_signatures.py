"""Public methods beside those of the installed official SDK: names, order, kinds and defaults of
their arguments are the same, but for what DIFFERENCES lists, and it lists nothing else."""

import inspect

import pytest
import tinker as official

import tinker_gmi

CLIENTS = ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"]

NO_TELEMETRY = "nothing about its user is sent"
INTERNAL = "the official client's own inside, no document names it"
MISSING = "not written yet"
OURS = "an extension"
CLOSED = "ends the connections of a client that was constructed directly"
DIFFERENCES = {
    "AdminClient.close": CLOSED,
    "AdminClient.get_telemetry": NO_TELEMETRY,
    "RestClient.close": CLOSED,
    "RestClient.get_telemetry": NO_TELEMETRY,
    "SamplingClient.create": INTERNAL,
    "SamplingClient.from_sampler_handle": MISSING,
    "SamplingClient.get_sampler_handle": MISSING,
    "SamplingClient.get_telemetry": NO_TELEMETRY,
    "SamplingClient.on_queue_state_change": MISSING,
    "SamplingClient.sampling_session_id": OURS,
    "ServiceClient.close": "a default, as most scripts end in success; and it has ended on return",
    "ServiceClient.create_custom_loss": MISSING,
    "ServiceClient.create_lora_training_client": MISSING,  # optimizer
    "ServiceClient.create_lora_training_client_async": MISSING,
    "ServiceClient.create_sampling_client": MISSING,  # retry_config, record_stability_info
    "ServiceClient.create_sampling_client_async": MISSING,
    "ServiceClient.create_training_client_from_state": MISSING,  # optimizer
    "ServiceClient.create_training_client_from_state_async": MISSING,
    "ServiceClient.get_telemetry": NO_TELEMETRY,
    "ServiceClient.holder": INTERNAL,
    "TrainingClient.create_sampling_client": MISSING,  # retry_config, record_stability_info
    "TrainingClient.create_sampling_client_async": MISSING,
    "TrainingClient.forward_backward_custom": MISSING,  # loss_type_input
    "TrainingClient.forward_backward_custom_async": MISSING,
    "TrainingClient.get_telemetry": NO_TELEMETRY,
    "TrainingClient.model_id": OURS,
    "TrainingClient.save_weights_and_get_sampling_client": MISSING,  # retry_config, ...
    "TrainingClient.save_weights_and_get_sampling_client_async": MISSING,
}


def arguments(client: type, method: str) -> list[tuple[str, object, object]] | None:
    """(name, kind, default) of each argument; None where there is no such method."""
    function = getattr(client, method, None)
    if not callable(function):
        return None if function is None else []
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("name", CLIENTS)
def test_arguments_are_the_official_ones_but_for_the_listed_differences(name: str) -> None:
    ours, theirs = getattr(tinker_gmi, name), getattr(official, name)
    methods = {m for m in (*dir(ours), *dir(theirs)) if not m.startswith("_")}
    different = {
        f"{name}.{method}"
        for method in methods
        if arguments(ours, method) != arguments(theirs, method)
    }
    assert different == {method for method in DIFFERENCES if method.startswith(f"{name}.")}


@pytest.mark.parametrize("name", CLIENTS)
def test_shared_arguments_keep_their_order_and_their_defaults(name: str) -> None:
    ours, theirs = getattr(tinker_gmi, name), getattr(official, name)
    for method in sorted(m for m in dir(ours) if not m.startswith("_") and hasattr(theirs, m)):
        mine, official_ones = arguments(ours, method), arguments(theirs, method)
        assert mine is not None
        assert official_ones is not None
        names = [argument for argument, _, _ in official_ones]
        listed = [argument for argument, _, _ in mine]
        assert listed == [argument for argument in names if argument in listed], method
