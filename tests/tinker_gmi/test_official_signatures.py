"""Public methods beside those of the installed official SDK: names, order, kinds and defaults of
their arguments are the same, but for what DIFFERENCES lists, and it lists nothing else."""

import inspect
from types import ModuleType

import pytest
import tinker as official

import tinker_gmi

CLIENTS = ["ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"]

NO_TELEMETRY = "nothing about its user is sent"
INTERNAL = "the official client's own inside, no document names it"
OURS = "an extension"
CLOSED = "ends the connections of a client that was constructed directly"
TYPED_ELSEWHERE = "one class with the fields of all kinds: "
HTTP = "of the official client's own HTTP layer; RetryPolicy is ours"
DIFFERENCES = {
    "AdminClient.close": CLOSED,
    "AdminClient.get_telemetry": NO_TELEMETRY,
    "RestClient.close": CLOSED,
    "RestClient.get_telemetry": NO_TELEMETRY,
    "SamplingClient.close": "ends the connections of a client of from_sampler_handle",
    "SamplingClient.create": INTERNAL,
    "SamplingClient.get_telemetry": NO_TELEMETRY,
    "SamplingClient.sampling_session_id": OURS,
    "ServiceClient.close": "a default, as most scripts end in success; and it has ended on return",
    "ServiceClient.get_telemetry": NO_TELEMETRY,
    "ServiceClient.holder": INTERNAL,
    "TrainingClient.get_telemetry": NO_TELEMETRY,
    "TrainingClient.model_id": OURS,
}

LEFT_OUT = {
    "tinker.APIResponse": HTTP,
    "tinker.AsyncAPIResponse": HTTP,
    "tinker.RequestOptions": HTTP,
    "tinker.Timeout": HTTP,
    "types.CheckpointBillingEvent": TYPED_ELSEWHERE + "BillingEventInfo",
    "types.EventType": NO_TELEMETRY,
    "types.FutureFailed": TYPED_ELSEWHERE + "FutureCompletion",
    "types.FutureFinished": TYPED_ELSEWHERE + "FutureCompletion",
    "types.FutureRetrieveResponse": INTERNAL,
    "types.GetBillingUsageRequest": INTERNAL,
    "types.GetCurrentCheckpointStorageUsageRequest": INTERNAL,
    "types.SamplingPrefillBillingEvent": TYPED_ELSEWHERE + "BillingEventInfo",
    "types.SamplingSampleBillingEvent": TYPED_ELSEWHERE + "BillingEventInfo",
    "types.SaveWeightsExternalResponseInternal": INTERNAL,
    "types.SaveWeightsForSamplerResponseInternal": INTERNAL,
    "types.SessionEndEvent": NO_TELEMETRY,
    "types.SessionStartEvent": NO_TELEMETRY,
    "types.Severity": NO_TELEMETRY,
    "types.StorageBillingEvent": TYPED_ELSEWHERE + "BillingEventInfo",
    "types.TelemetryBatch": NO_TELEMETRY,
    "types.TelemetryEvent": NO_TELEMETRY,
    "types.TrainingBillingEvent": TYPED_ELSEWHERE + "BillingEventInfo",
    "types.UnhandledExceptionEvent": NO_TELEMETRY,
    "types.UnloadModelRequest": "no client sends it; DeleteModelRequest is what this server takes",
    "types.UnloadModelResponse": "no client sends it; DeleteModelResponse is the answer here",
}
"""Public names of `tinker` and `tinker.types`, but for modules, that we have not."""


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


def test_public_names_are_the_official_ones_but_for_those_left_out() -> None:
    modules = {"tinker": (official, tinker_gmi), "types": (official.types, tinker_gmi.types)}
    missing = {
        f"{module}.{name}"
        for module, (theirs, ours) in modules.items()
        for name, value in list(vars(theirs).items())
        if not name.startswith("_") and not hasattr(ours, name)
        if not isinstance(value, ModuleType) and name != "annotations"
    }
    assert missing == set(LEFT_OUT)


def test_the_helpers_of_auth_have_the_official_names() -> None:
    assert [n for n in official.auth.__all__ if not hasattr(tinker_gmi.auth, n)] == []
