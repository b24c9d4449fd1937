"""Checks with pyright that a program that uses the package `spillway` sees the type of everything public, without guesses of its checker.

Classes that derive from torch's optimizers are excepted as far as torch is: this check runs without torch.

    python packaging/python_types.py PYRIGHT"""

import json
import os
import pathlib
import re
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parent / "python"
#: What pyright says about a class whose base it does not have.
_BY_BASE = re.compile(
    r"Type of (metaclass|base class .*|base class) (is partially )?unknown|Return type is partially unknown\n.*Return type is \"Offloaded\""
)


def main(pyright: str) -> int:
    command = [pyright, "--pythonpath", sys.executable, "--ignoreexternal", "--verifytypes", "spillway", "--outputjson"]
    done = subprocess.run(command, cwd=PACKAGE, env={**os.environ, "PYTHONPATH": str(PACKAGE)}, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["typeCompleteness"]
    except (json.JSONDecodeError, KeyError):
        print(f"pyright has no result: {done.stdout}{done.stderr}")
        return 2
    if not found["exportedSymbolCounts"]["withKnownType"]:
        print("pyright found no public name of spillway")
        return 2
    unclear = [
        symbol for symbol in found["symbols"] if symbol["isExported"] and not (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"])
    ]
    told = [
        (symbol["name"], said["message"]) for symbol in unclear for said in symbol["diagnostics"] if not _BY_BASE.search(said["message"])
    ]
    for name, message in told:
        print(f"{name}: {message}")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
