"""What the dashboard of docs/deploy asks for is in a real server's `/metrics`."""

import json
import re
from collections.abc import Iterator

import httpx
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families

from tests import serving

DASHBOARD = serving.ROOT / "docs" / "deploy" / "grafana.json"
FUNCTIONS = {"histogram_quantile", "label_values", "max", "rate", "sum"}
NAME = re.compile(r"\b(?:tinkercloud|process)_\w+")


def expressions() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def names() -> set[str]:
    return {name for expression in expressions() for name in NAME.findall(expression)}


def exposed(http: httpx.Client) -> set[str]:
    """Of samples; a metric that has none yet is not there for a query."""
    text = http.get("/metrics").text
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples}


def test_every_word_of_an_expression_is_a_metric_a_function_or_a_label() -> None:
    known = {"by", "instance", "kind", "phase", "outcome", "user", "le", "__rate_interval"}
    for expression in expressions():
        bare = re.sub(r'"[^"]*"|\$instance', "", expression)
        words = set(re.findall(r"[A-Za-z_]\w*", bare))
        assert {w for w in words if not NAME.fullmatch(w)} <= known | FUNCTIONS, expression


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory) -> Iterator[serving.Server]:
    """The embedded engine on a tiny random model."""
    arguments = ("--model", f"tiny={folder}", "--dtype", "float32", "--speculate", "suffix")
    data_dir = tmp_path_factory.mktemp("server") / "data"
    with serving.start_server(*arguments, data_dir=data_dir) as server:
        yield server


def test_a_server_that_has_trained_and_sampled_has_every_metric(
    server: serving.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.sdk_environment.items():
        monkeypatch.setenv(name, value)
    missing = names()
    assert len(missing) > 25
    with server.http() as http:
        service = tinker.ServiceClient()
        model = service.create_lora_training_client(base_model="tiny", rank=4).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints([1, 2, 3, 4] * 4)
        params = tinker.SamplingParams(max_tokens=64, temperature=0.0)
        # Counts of the engine come about once a second, while it works.
        for _ in range(40):
            samples = (
                sampler.sample(prompt, num_samples=1, sampling_params=params) for _ in range(8)
            )
            held = [sample.future() for sample in samples]
            # The SDK sends from a thread of its own: what is queued is seen while samples last.
            while not all(future.done() for future in held):
                missing -= exposed(http)
            missing -= exposed(http)
            if missing <= {"tinkercloud_queue_oldest_seconds"}:
                break
    # Only while an operation waits for another of its model.
    assert missing <= {"tinkercloud_queue_oldest_seconds"}
