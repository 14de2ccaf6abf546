"""Checks of Python and of what is installed in it."""

from collections.abc import Callable

from tinkercloud.doctor.finding import Facts, Finding
from tinkercloud.doctor.requirements import misfit, remedy, requirements
from tinkercloud.doctor.target import Target

Look = Callable[[Target, Facts], Finding]


def python(target: Target, facts: Facts) -> Finding:
    answer = facts["python"]
    if "error" in answer:
        return Finding("missing", answer["error"], "install Python 3.11 or newer")
    brief = f"Python {answer['version']}"
    return Finding("ok", f"{answer['version']} ({answer['executable']})", brief=brief)


def extra(name: str, *besides: str) -> Look:
    """All packages of the extra, but for those that have a check of their own."""

    def look(target: Target, facts: Facts) -> Finding:
        if "error" in facts["versions"]:
            return Finding("missing", facts["versions"]["error"], remedy(name))
        versions = {p: facts["versions"].get(p) for p in sorted({*requirements(name)} - {*besides})}
        misfits = {p: text for p, v in versions.items() if (text := misfit(p, v, name))}
        if misfits:
            absent = [p for p in misfits if versions[p] is None]
            others = [text for p, text in misfits.items() if p not in absent]
            brief = "; ".join([*([f"no {', '.join(absent)}"] if absent else []), *others])
            return Finding("missing", "; ".join(misfits.values()), remedy(name), brief)
        fact = ", ".join(f"{package} {version}" for package, version in versions.items())
        return Finding("ok", fact, brief="")

    return look


def imported(name: str, extra: str, without: str = "") -> Look:
    """A package that can be imported, in a version that the extra allows.

    without: what happens where it cannot; its absence is a warning then.
    """

    def look(target: Target, facts: Facts) -> Finding:
        answer = facts[name]
        advice = " ".join(filter(None, (without, remedy(extra))))
        if "error" in answer:
            status = "warning" if without else "missing"
            return Finding(status, answer["error"], advice, _absent(name, answer["error"]))
        text = misfit(name, answer["version"], extra)
        if text:
            return Finding("warning", text, advice)
        return Finding("ok", answer["version"], brief=f"{name} {answer['version']}")

    return look


def _absent(name: str, error: str) -> str | None:
    return f"no {name}" if error.startswith("ModuleNotFoundError") else None


def torch(target: Target, facts: Facts) -> Finding:
    answer = facts["torch"]
    if "error" in answer:
        brief = _absent("torch", answer["error"])
        return Finding("missing", answer["error"], remedy("embedded"), brief)
    build = f"CUDA {answer['cuda']}" if answer["cuda"] else "a CPU build"
    fact, brief = f"{answer['version']}, {build}", f"torch {answer['version']}"
    text = misfit("torch", answer["version"], "embedded")
    if text:
        return Finding("missing", text, remedy("embedded"))
    if not answer["cuda"] and facts["driver"].get("gpus"):
        advice = "this machine has GPUs: install a CUDA build of torch"
        return Finding("warning", fact, advice, f"torch {fact}")
    return Finding("ok", fact, brief=brief)
