"""Draws docs/overview.svg: `python docs/overview.py`.

Colours follow the reader's theme, light or dark; the card behind everything is opaque, so that the
picture can be read where a viewer knows no themes.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

TARGET = Path(__file__).with_name("overview.svg")
WIDTH, HEIGHT, TOP = 980, 512, 16
LIGHT = {
    "card": "#ffffff",
    "edge": "#57606a",
    "text": "#1f2328",
    "faint": "#57606a",
    "client": "#ddf4ff",
    "server": "#eef1f4",
    "engine": "#dafbe1",
    "cluster": "#fff1e5",
    "chip": "#ffffff",
    "draft": "#fbefff",
}
DARK = {
    "card": "#0d1117",
    "edge": "#8b949e",
    "text": "#e6edf3",
    "faint": "#9da7b1",
    "client": "#0c2d4a",
    "server": "#1c2128",
    "engine": "#10301d",
    "cluster": "#3a2412",
    "chip": "#161b22",
    "draft": "#301a45",
}
FONT = "font-family: 'DejaVu Sans', Verdana, 'Segoe UI', Helvetica, Arial, sans-serif"


def style() -> str:
    """One class for each colour of a surface, one for each kind of text and line."""
    dark = "\n".join(f"    {rule}" for rule in colours(DARK))
    light = "\n".join(f"  {rule}" for rule in colours(LIGHT))
    return (
        f"  text {{ {FONT}; font-size: 13px }}\n  .title {{ font-size: 15px; font-weight: bold }}\n"
        "  .small { font-size: 11.5px }\n  .line { fill: none; stroke-width: 1.6 }\n"
        f"{light}\n  @media (prefers-color-scheme: dark) {{\n{dark}\n  }}"
    )


def colours(palette: dict[str, str]) -> list[str]:
    surfaces = [name for name in palette if name not in ("edge", "text", "faint")]
    return [
        *(f".{name} {{ fill: {palette[name]}; stroke: {palette['edge']} }}" for name in surfaces),
        f"text {{ fill: {palette['text']} }}",
        f".small {{ fill: {palette['faint']} }}",
        f".line {{ stroke: {palette['edge']} }}",
        f".head {{ fill: {palette['edge']} }}",
    ]


def box(kind: str, x: float, y: float, size: tuple[float, float]) -> str:
    width, height = size
    place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="8"'
    return f'<rect class="{kind}" {place}/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    marks = f' class="{kind}"' if kind else ""
    return f'<text{marks} x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def panel(kind: str, x: float, y: float, size: tuple[float, float], titles: Sequence[str]) -> str:
    """titles: the first is large, the others stand below it."""
    lines = [text(x + 14, y + 24, titles[0], "title")]
    lines += [text(x + 14, y + 42 + 16 * i, more, "small") for i, more in enumerate(titles[1:])]
    return "\n".join([box(kind, x, y, size), *lines])


def chip(x: float, y: float, width: float, words: Sequence[str], kind: str = "chip") -> str:
    """A part inside a panel: its name, and what it does below."""
    height = 16 + 17 * len(words)
    lines = [
        text(x + width / 2, y + 21 + 17 * i, line, "small" if i else "", "middle")
        for i, line in enumerate(words)
    ]
    return "\n".join([box(kind, x, y, (width, height)), *lines])


def arrow(*points: tuple[float, float], both: bool = False) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    start = ' marker-start="url(#head)"' if both else ""
    return f'<polyline class="line" points="{path}"{start} marker-end="url(#head)"/>'


def client() -> list[str]:
    return [
        panel("client", 24, 40, (196, 222), ["your script", "tinker, tinker_gmi or curl"]),
        chip(38, 98, 168, ["forward_backward"]),
        chip(38, 137, 168, ["optim_step"]),
        chip(38, 176, 168, ["sample"]),
        chip(38, 215, 168, ["save_state, load_state"]),
        arrow((220, 150), (312, 150), both=True),
        text(266, 124, "HTTP", "", "middle"),
        text(266, 140, "JSON, protobuf", "small", "middle"),
        text(24, 296, "The loop is yours, in plain", "small"),
        text(24, 312, "Python. The same script runs", "small"),
        text(24, 328, "on either backend.", "small"),
    ]


def server() -> list[str]:
    return [
        panel("server", 312, 40, (204, 378), ["API process", "tinkercloud serve; without torch"]),
        chip(326, 98, 176, ["routers", "bodies to types, and back"]),
        chip(326, 160, 176, ["services", "names, order, versions"]),
        chip(326, 222, 176, ["core", "a lane for each model"]),
        chip(326, 284, 176, ["storage", "SQLite"]),
        text(414, 364, "What is acknowledged is on", "small", "middle"),
        text(414, 380, "disk before the client sees it.", "small", "middle"),
    ]


def engine() -> list[str]:
    """Training, sampling, and the loop by which drafts follow the policy."""
    return [
        arrow((516, 150), (606, 150), both=True),
        text(561, 140, "socket pair", "small", "middle"),
        panel("engine", 606, 40, (350, 222), ["engine process", "backend embedded: one machine"]),
        chip(620, 98, 132, ["trainer", "LoRA or full"]),
        chip(810, 98, 132, ["sampler", "compiled passes"]),
        chip(620, 184, 132, ["draft training", "in its share of time"], "draft"),
        chip(810, 184, 132, ["drafters", "suffix, head, model"], "draft"),
        arrow((752, 122), (810, 122)),
        text(781, 114, "versions", "small", "middle"),
        arrow((686, 148), (686, 184)),
        text(694, 170, "hidden states", "small"),
        arrow((876, 184), (876, 148)),
        text(884, 170, "drafts", "small"),
        arrow((752, 208), (810, 208)),
        text(781, 200, "a draft", "small", "middle"),
    ]


def cluster() -> list[str]:
    return [
        arrow((516, 346), (606, 346), both=True),
        text(561, 336, "Ray actors", "small", "middle"),
        panel(
            "cluster", 606, 278, (350, 140), ["GPUs of a model", "backend cluster: placed by Ray"]
        ),
        chip(620, 336, 132, ["training ranks", "Megatron-core"]),
        chip(810, 336, 132, ["rollout engines", "SGLang"]),
        arrow((752, 360), (810, 360)),
        text(781, 352, "weights", "small", "middle"),
        text(781, 405, "on shared GPUs, training and sampling alternate", "small", "middle"),
    ]


def disk() -> list[str]:
    return [
        arrow((414, 418), (414, 448), both=True),
        arrow((781, 418), (781, 448), both=True),
        panel("server", 312, 448, (644, 56), ["data folder", "keys, results, published versions"]),
        text(942, 472, "checkpoints in one format: saved by either", "small", "end"),
        text(942, 490, "backend, loaded by the other, under any plan", "small", "end"),
    ]


def draw() -> str:
    parts = [*client(), *server(), *engine(), *cluster(), *disk()]
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="head" d="M0,0 L10,5 L0,10 z"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {TOP} {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img">',
            "<title>How tinkercloud's parts work together</title>",
            f"<style>\n{style()}\n</style>",
            f"<defs>{head}</defs>",
            box("card", 0.5, TOP + 0.5, (WIDTH - 1, HEIGHT - 1)),
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
