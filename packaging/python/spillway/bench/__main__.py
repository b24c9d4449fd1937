"""Measures Spillway against what is installed, in one process and in alternation.

    python -m spillway.bench adam [--sizes 1Mi,16Mi,100Mi] [--rounds 7]
    python -m spillway.bench undo [--size 100Mi] [--rounds 9]
    python -m spillway.bench torch [--size 100Mi] [--rounds 9]
    python -m spillway.bench accumulate [--size 100Mi] [--rounds 15]
    python -m spillway.bench megatron [--tensors 512] [--elements 1Mi] [--rounds 9]
    python -m spillway.bench io [--dir DIRECTORY] [--size 128Mi] [--rounds 7]
    python -m spillway.bench compare OLD.json NEW.json

Options of all that measure: --json [FILE], --plot FILE.svg, --compare OLD.json. `compare` measures nothing."""

import argparse

from .. import _console
from . import _accumulate, _adam, _io, _megatron, _output, _torch, _undo


def main() -> None:
    options = _arguments()
    if options.measurement:
        _output.run(options, options.measurement)
    else:
        _output.compare(options.old, options.new)


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m spillway.bench", description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(required=True, metavar="adam|undo|torch|accumulate|megatron|io|compare")
    adam = kinds.add_parser("adam", help="the optimizer step against DeepSpeed's op and torch")
    adam.set_defaults(measurement=_adam)
    adam.add_argument("--sizes", type=_sizes, default=_sizes("1Mi,16Mi,100Mi"))
    adam.add_argument("--tensors", type=_count, default=10_000)
    undo = kinds.add_parser("undo", help="a step that can be rolled back, and its rollback, against the plain step")
    undo.set_defaults(measurement=_undo)
    undo.add_argument("--size", type=_size, default=_size("100Mi"), help="number of parameters")
    torch = kinds.add_parser("torch", help="spillway.torch against torch's optimizers")
    torch.set_defaults(measurement=_torch)
    torch.add_argument("--size", type=_size, default=_size("100Mi"), help="parameters of the largest tensor")
    accumulate = kinds.add_parser("accumulate", help="sums of gradients against torch's add_")
    accumulate.set_defaults(measurement=_accumulate)
    accumulate.add_argument("--size", type=_size, default=_size("100Mi"), help="elements of the tensors")
    megatron = kinds.add_parser("megatron", help="Megatron's HybridDeviceOptimizer with Spillway and with torch")
    megatron.set_defaults(measurement=_megatron)
    megatron.add_argument("--tensors", type=_count, default=512)
    megatron.add_argument("--elements", type=_size, default=_size("1Mi"), help="elements of each tensor")
    io = kinds.add_parser("io", help="files to and from memory against DeepSpeed's async_io op")
    io.set_defaults(measurement=_io)
    io.add_argument("--dir", default=".", help="where the test files are made")
    io.add_argument("--size", type=_size, default=_size("128Mi"), help="bytes of each measurement")
    io.add_argument("--tensor", type=_sizes, default=_sizes("128Mi,4Mi"), help="sizes of the tensors they are cut into")
    io.add_argument(
        "--files",
        type=lambda text: [("one", "each").index(word) == 1 for word in text.split(",")],
        default=[False],
        help="one,each: all tensors in one file, or a file each",
    )
    for kind, rounds in ((adam, 7), (undo, 9), (torch, 9), (accumulate, 15), (megatron, 9), (io, 7)):
        kind.add_argument("--rounds", type=_count, default=rounds)
        _output.add_arguments(kind)
    compare = kinds.add_parser("compare", help="compares two reports of one benchmark")
    compare.set_defaults(measurement=None)
    compare.add_argument("old", metavar="OLD.json")
    compare.add_argument("new", metavar="NEW.json")
    return parser.parse_args()


def _sizes(text):
    return [_size(part) for part in text.split(",")]


def _size(text):
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return _count(text[:-2]) * units[text[-2:]] if text[-2:] in units else _count(text)


def _count(text):
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


if __name__ == "__main__":
    _console.run(main)
