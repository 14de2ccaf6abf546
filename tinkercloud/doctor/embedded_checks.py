"""Checks of what the embedded backend computes on, of its memory, and of the models to serve."""

from tinkercloud.doctor.facts import NO_ANSWER
from tinkercloud.doctor.finding import GIB, Facts, Finding, unknown
from tinkercloud.doctor.target import Target

BYTES = {"bfloat16": 2, "float32": 4}


def device(target: Target, facts: Facts) -> Finding:
    answer = facts["engine"]
    if "error" in answer:
        if "error" in facts["torch"]:
            return unknown("torch")
        remedy = _remedy(answer["error"], "the embedded engine must start on this machine")
        return Finding("missing", answer["error"], remedy)
    if answer["device"] == "cuda":
        gpu = answer["gpu"]
        return Finding("ok", f"{gpu['name']}, {gpu['total_bytes'] / GIB:.0f} GiB")
    return Finding("ok", f"CPU, {answer['cores']} cores")


def _remedy(error: str, remedy: str) -> str:
    """Kernels are compiled at their first use, which takes minutes where others compute too."""
    late = "a busy machine may only be late, run it again; " if NO_ANSWER in error else ""
    return late + remedy


def processor(target: Target, facts: Facts) -> Finding:
    answer = facts["host"].get("processor", {})
    if not answer:
        return Finding("ok", "its instruction sets are unknown", brief="")
    names = answer["instructions"]
    fact = f"{answer['model']}: {', '.join(names) or 'no AVX2'}"
    if not names and facts["engine"].get("device") == "cpu":
        advice = "expect a fraction of the speed; a processor with AVX2 or a GPU helps"
        return Finding("warning", fact, advice, "no AVX2")
    return Finding("ok", fact, brief=", ".join(names))


def number_type(target: Target, facts: Facts) -> Finding:
    answer = facts["engine"]
    if "error" in answer:
        return unknown("torch")
    dtype, best = answer["dtype"], answer["best_dtype"]
    if target.dtype == "auto":
        return Finding("ok", f"{dtype} (--dtype auto)")
    if dtype == "bfloat16" != best:
        fact = "bfloat16, for which this device has no instructions"
        return Finding("warning", fact, "float32 is several times faster here: --dtype auto")
    return Finding("ok", f"{dtype} (auto would be {best})", brief=dtype)


def kernels(target: Target, facts: Facts) -> Finding:
    answer = facts["engine"]
    if "error" in answer:
        return unknown("torch")
    if answer["kernels"] == "C":
        return Finding("ok", f"C kernels for the instruction set {answer['instruction_set']}")
    if answer["kernels"]:
        return Finding("ok", f"{answer['kernels']} kernels, compiled for this machine")
    advice = "PyTorch computes, at a part of the speed"
    if not answer["compiler"]:
        advice = f"install gcc or clang, or set CC; {advice} until then"
    return Finding("warning", answer["kernels_error"], advice)


def exactness(target: Target, facts: Facts) -> Finding:
    """What is promised: docs/architecture.md, "What is exact"."""
    answer = facts["deviation"]
    if "error" in answer:
        if "error" in facts["torch"]:
            return unknown("torch")
        remedy = _remedy(answer["error"], "sampling and training must work here")
        return Finding("warning", answer["error"], remedy)
    promised, largest = answer["promised"], answer["largest"]
    if promised and largest == 0:
        fact = f"promised; {answer['tokens']} tokens of a tiny model are equal to the bit"
        return Finding("ok", fact, brief="trained = sampled to the bit")
    apart = f"up to {largest:.1e} nats apart on a tiny model"
    if promised:
        advice = "a fault in the compiled kernels: report it; try a lower --engine-instruction-set"
        return Finding("warning", f"promised, but {apart}", advice)
    fact = f"not promised, which needs the compiled kernels; {apart}"
    return Finding("ok", fact, brief=f"trained and sampled up to {largest:.1e} nats apart")


def products(target: Target, facts: Facts) -> Finding:
    """Either is in order: what it means is in docs/architecture.md, "What is exact"."""
    verdicts = facts["engine"].get("row_invariant", {})
    if not verdicts:
        return Finding("ok", "not asked", brief="")
    return Finding(
        "ok", ", ".join(f"{n}: {'' if v else 'not '}row-invariant" for n, v in verdicts.items())
    )


def memory(target: Target, facts: Facts) -> Finding:
    if facts["engine"].get("device") == "cuda":
        answer, where = facts["engine"]["gpu"], "GPU memory"
    else:
        answer, where = facts["host"].get("memory", {}), "memory"
    if not answer:
        return Finding("ok", "its size is unknown", brief="")
    free = f"{answer['free_bytes'] / GIB:.1f} GiB of {where} free"
    needed_bytes = _weight_bytes(target, facts) + target.cache_bytes
    if target.backend != "embedded" or not needed_bytes:
        return Finding("ok", f"{free} of {answer['total_bytes'] / GIB:.1f}", brief=free)
    fact = f"{free}; weights and caches take up to {needed_bytes / GIB:.1f}"
    if needed_bytes > answer["free_bytes"]:
        advice = (
            "less for caches: --engine-kv-cache-bytes, --engine-version-cache-bytes, "
            "--engine-activation-bytes; or a smaller model"
        )
        return Finding("warning", fact, advice)
    return Finding("ok", fact)


def _weight_bytes(target: Target, facts: Facts) -> int:
    """Of the first model: others are loaded when they are first asked for."""
    size = BYTES.get(facts["engine"].get("dtype", ""), 0)
    if not target.models:
        return 0
    return size * facts["models"].get(target.models[0].name, {}).get("parameters", 0)


def models(target: Target, facts: Facts) -> Finding:
    answer = facts["models"]
    if "error" in answer:
        return Finding("missing", answer["error"], "name a model with --model NAME=PATH")
    if not answer:
        return _no_model(target)
    errors = [f"{name}: {row['error']}" for name, row in answer.items() if "error" in row]
    if errors:
        advice = "name a Hugging Face folder or a GGUF file: --model NAME=PATH"
        return Finding("missing", "; ".join(errors), advice)
    return Finding("ok", ", ".join(f"{name} ({_shown(row)})" for name, row in answer.items()))


def _no_model(target: Target) -> Finding:
    match target.backend:
        case "embedded":
            fact = "none; the first start fetches the default one"
            return Finding("warning", fact, "`tinkercloud fetch smollm2`, or --model NAME=PATH")
        case "cluster":
            return Finding("warning", "none", "serving needs --model NAME=PATH", "no model")
        case _:
            return Finding("ok", "none needed", brief="")


def _shown(model: dict) -> str:
    if "parameters" not in model:
        return model["architecture"]
    return f"{model['architecture']}, {_count(model['parameters'])} parameters"


def _count(parameters: int) -> str:
    if parameters < 10**9:
        return f"{parameters / 1e6:.0f}M"
    return f"{parameters / 1e9:.1f}B"
