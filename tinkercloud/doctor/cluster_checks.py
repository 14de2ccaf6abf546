"""Checks of what the cluster backend runs on: Ray and its nodes, Megatron-core's layers, SGLang."""

from tinkercloud.doctor.finding import GIB, Facts, Finding
from tinkercloud.doctor.requirements import misfit, remedy
from tinkercloud.doctor.software_checks import imported
from tinkercloud.doctor.target import Target


def ray(target: Target, facts: Facts) -> Finding:
    answer, where = facts["ray"], target.ray_address or "a local one"
    if "skipped" in answer:
        return Finding("ok", answer["skipped"])
    if "error" in answer:
        advice = remedy("cluster")
        if target.ray_address:
            advice = f"`ray health-check --address {target.ray_address}` must answer here"
        return Finding("missing", f"{where}: {answer['error']}", advice)
    text = misfit("ray", answer["version"], "cluster")
    if text:
        return Finding("missing", text, remedy("cluster"))
    fact = f"{answer['version']}, {where}"
    guarded = f"{fact}, {answer['access']}"
    return Finding("ok", guarded, brief=f"Ray {guarded if target.ray_address else fact}")


def nodes(target: Target, facts: Facts) -> Finding:
    rows = facts["ray"].get("nodes")
    if rows is None:
        return _not_probed(facts)
    silent = [node for node in rows if "error" in node]
    if silent:
        errors = "; ".join(f"{node['address']}: {node['error']}" for node in silent)
        return Finding("missing", errors, "restart Ray on these nodes with the same environment")
    fact = ", ".join(
        f"{node['address']} ({node['gpus']:.0f} GPUs, {node['cpus']:.0f} CPUs, "
        f"{node['object_store_bytes'] / GIB:.1f} GiB objects)"
        for node in rows
    )
    brief = f"nodes: {len(rows)}, with {sum(node['gpus'] for node in rows):.0f} GPUs"
    if target.needs_gpus and not any(node["gpus"] for node in rows):
        advice = "no node offers a GPU: start Ray with --num-gpus"
        return Finding("missing", fact, advice, brief)
    return Finding("ok", fact, brief=brief)


def same_versions(target: Target, facts: Facts) -> Finding:
    rows = _answering(facts)
    if not rows:
        return _not_probed(facts)
    versions = {"python": [node["python"].rpartition(".")[0] for node in rows]}
    versions |= {name: [node["versions"][name] for node in rows] for name in rows[0]["versions"]}
    differing = [
        f"{name}: {', '.join(sorted(map(str, set(column))))}"
        for name, column in versions.items()
        if len(set(column)) > 1
    ]
    if differing:
        return Finding("missing", "; ".join(differing), "install one set of versions on all nodes")
    return Finding("ok", f"{len(rows)} nodes agree", brief="")


def shared_data(target: Target, facts: Facts) -> Finding:
    rows = _answering(facts)
    if not rows:
        return _not_probed(facts)
    blind = [node["address"] for node in rows if not node["sees_data_dir"]]
    if blind:
        return Finding(
            "missing",
            f"{target.data_dir} is not seen by {', '.join(blind)}",
            "mount one file system there on every node, or choose --data-dir on one",
        )
    fact = f"{target.data_dir} is seen by {len(rows)} nodes"
    return Finding("ok", fact, brief=f"seen by {len(rows)} nodes")


def _answering(facts: Facts) -> list[dict]:
    return [node for node in facts["ray"].get("nodes", []) if "error" not in node]


def _not_probed(facts: Facts) -> Finding:
    return Finding("ok", facts["ray"].get("skipped", "Ray does not run"), brief="")


def transformer_engine(target: Target, facts: Facts) -> Finding:
    finding = imported("transformer-engine", "cuda")(target, facts)
    if finding.status == "missing" and not target.needs_gpus:
        return Finding("ok", "not used on CPUs", brief="")
    return finding


def sglang(target: Target, facts: Facts) -> Finding:
    answer = facts["sglang"]
    if "error" in answer:
        advice = remedy("sglang") + ", or name its command with cluster.sglang_command"
        return Finding("missing", answer["error"], advice, "no SGLang")
    text = misfit("sglang", answer["version"], "sglang")
    if text:
        return Finding("warning", text, remedy("sglang"))
    fact = f"{answer['version']} with Python {answer['python']}, torch {answer['torch']}"
    return Finding("ok", fact, brief=f"SGLang {answer['version']}, torch {answer['torch']}")


def kernels(target: Target, facts: Facts) -> Finding:
    answer = facts["sglang"]
    if "error" in answer:
        return Finding("missing", "SGLang itself is missing", remedy("sglang"), brief="")
    if "kernels_error" in answer:
        status = "missing" if target.needs_gpus else "warning"
        return Finding(status, answer["kernels_error"], "pip install sglang-kernel, for its torch")
    return Finding("ok", str(answer["kernels"]), brief=f"kernels {answer['kernels']}")


def memory_saver(target: Target, facts: Facts) -> Finding:
    here, there = facts["torch-memory-saver"], facts["sglang"].get("torch_memory_saver")
    if "error" not in here and there:
        fact = f"{here['version']} here, {there} with SGLang"
        return Finding("ok", fact, brief=f"torch_memory_saver {here['version']}")
    where = "in SGLang's Python" if "error" not in here else "here"
    return Finding(
        "warning",
        f"not {where}",
        "trainer and engines cannot take turns on one GPU: place them apart "
        f"(rollout GPUs of their own), or {remedy('cuda')}",
        f"no torch_memory_saver {where}",
    )
