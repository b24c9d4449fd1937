"""Draws docs/iteration.svg, the picture of the README, from the record of iterations on a GPU.

python docs/tools/iteration.py"""

import pathlib

import measurements
from measurements import middle

PICTURE = pathlib.Path(__file__).resolve().parents[1] / "iteration.svg"
#: The optimizers of the picture as the record names them, and what the picture says of each.
BARS = {
    "torch fused, everything on the GPU, bf16 states": "torch, all states on the GPU (16 bits, unclipped)",
    "torchao CPUOffloadOptimizer, bf16 states": "torchao CPUOffloadOptimizer (16 bits, unclipped)",
    "spillway offload": "Spillway offload",
    "DeepSpeed ZeRO-2 with offload": "DeepSpeed ZeRO-2 with offload",
    "DeepSpeed SuperOffload on Spillway": "DeepSpeed SuperOffload on Spillway",
    "DeepSpeed SuperOffload": "DeepSpeed SuperOffload",
}
_WIDTH, _LEFT, _ROW, _TOP = 900, 370, 30, 40
_OWN, _OTHER = "#1f6feb", "#9aa4b2"


def milliseconds():
    """Milliseconds of an iteration with batch 32 and no clipped step, by the names of BARS."""
    rows = measurements.read("gpu_iteration")["rows"]
    cases = [(row["case"], middle(row["figures"]["ms"])) for row in rows]
    return {
        case["optimizer"]: ms
        for case, ms in cases
        if (case["model"], case["batch"], case["clipped"]) == ("554 M", 32, "none") and case["optimizer"] in BARS
    }


def picture():
    """The text of the picture."""
    found = milliseconds()
    longest = max(found.values())
    height = _TOP + _ROW * len(BARS) + 10
    lines = [
        f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg"',
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="22" font-weight="bold">Milliseconds of a training iteration: 554 M parameters in bf16, batch 32, one H100</text>',
    ]
    for place, (name, label) in enumerate(BARS.items()):
        top, length = _TOP + _ROW * place, (_WIDTH - _LEFT - 70) * found[name] / longest
        colour = _OWN if "pillway" in label else _OTHER
        lines += [
            f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end">{label}</text>',
            f'<rect x="{_LEFT}" y="{top + 2}" width="{length:.0f}" height="{_ROW - 8}" fill="{colour}"/>',
            f'<text x="{_LEFT + length + 6:.0f}" y="{top + 17}">{found[name]:,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
