"""Draws the pictures of the page about narrow states from the records of trainings.

python docs/tools/losses.py"""

import pathlib

import measurements

_DOCS = pathlib.Path(__file__).resolve().parents[1]
#: The record and the model of each picture.
PICTURES = {
    _DOCS / "losses.svg": ("narrow_losses", "a small GPT"),
    _DOCS / "losses-25m.svg": ("narrow_losses_25m", "a GPT of 25 M parameters"),
}
PLAIN = "float32"
_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5")
#: The place of the axes, in pixels, and the steps of a point.
_LEFT, _RIGHT, _TOP, _BOTTOM, _POINT = 80, 660, 50, 330, 100


def curves(record):
    """Of each kind of states the losses at each point: the mean of the seeds, the lowest and the highest, by kind and name."""
    rows = measurements.read(record)["rows"]
    return {row["case"]["states"]: {name: figure["runs"] for name, figure in row["figures"].items()} for row in rows}


def picture(record, model):
    """The text of a picture: what the loss of each kind is above the mean of float32 states, and the range of their seeds."""
    found = curves(record)
    plain = found[PLAIN]
    kinds = {kind: own for kind, own in found.items() if kind != PLAIN}
    above = {kind: [one - other for one, other in zip(own["curve"], plain["curve"], strict=True)] for kind, own in kinds.items()}
    band = [[one - mean for one, mean in zip(plain[name], plain["curve"], strict=True)] for name in ("lowest", "highest")]
    values = [value for line in (*above.values(), *band) for value in line]
    most = max(map(abs, values)) * 1.1
    points = len(plain["curve"])

    def at(point, value):
        x = _LEFT + (_RIGHT - _LEFT) * (point + 1) / points
        return f"{x:.1f},{(_TOP + _BOTTOM) / 2 - (_BOTTOM - _TOP) / 2 * value / most:.1f}"

    lower, upper = ([at(point, value) for point, value in enumerate(line)] for line in band)
    lines = [
        '<svg width="900" height="380" viewBox="0 0 900 380" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13">',
        '<rect width="900" height="380" fill="white"/>',
        f'<text x="10" y="24" font-weight="bold">Loss above the mean of float32 states, while {model} trains</text>',
        f'<polygon points="{" ".join([*lower, *reversed(upper)])}" fill="#e5e7eb"/>',
        f'<line x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{_BOTTOM}" stroke="black"/>',
        f'<line x1="{_LEFT}" y1="{_BOTTOM}" x2="{_RIGHT}" y2="{_BOTTOM}" stroke="black"/>',
        f'<text x="{_RIGHT}" y="{_BOTTOM + 20}" text-anchor="end">step {points * _POINT:,}</text>',
    ]
    for value in (-most / 1.1, 0, most / 1.1):
        y = at(0, value).split(",")[1]
        lines.append(f'<text x="{_LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{value:+.3f}</text>')
    named = [*zip(above, above.values(), _COLOURS, strict=False)]
    for place, (kind, line, colour) in enumerate(named):
        path = " ".join(at(point, value) for point, value in enumerate(line))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{_RIGHT + 16}" y="{_TOP + 20 + 22 * place}" fill="{colour}">{kind}</text>')
    lines.append(f'<text x="{_RIGHT + 16}" y="{_TOP + 20 + 22 * len(named)}" fill="#6b7280">grey: range of the seeds, float32</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    for path, of in PICTURES.items():
        path.write_text(picture(*of))
