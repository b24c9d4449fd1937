"""States on a tier whose path stops responding, and a close while threads step: errors after the I/O timeout, an optimizer that can be
closed, and a clean exit."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

import spillway

ROOT = pathlib.Path(__file__).resolve().parents[2]
START = f"""
import os, signal, sys, tempfile, threading, time
sys.path[:0] = [{str(ROOT / "packaging" / "python")!r}, {str(ROOT / "packaging" / "python" / "tests")!r}]
import torch, spillway
from spillway import torch as own

def made(paths, **options):
    params = [torch.nn.Parameter(torch.ones(20_000)) for _ in range(4)]
    optimizer = own.AdamW(params, lr=0.1, tier=own.TierOptions(paths, part_elements=8192, pin_memory=False, **options))
    for param in params:
        param.grad = torch.ones(20_000)
    return params, optimizer
"""
#: Calls while the store does not respond. Each ends with or without an error of Spillway, within the timeout of a few transfers.
CALLS = {"step": ["step", "commit"], "commit": ["commit"], "state dict": ["state_dict"], "close": []}


def run(code):
    done = subprocess.run([sys.executable, "-c", START + textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("end\n"), done


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("calls", CALLS)
def test_a_store_that_stops_responding(calls):
    pytest.importorskip("boto3")
    try:
        spillway.Tier(["s3://"], job="test")
    except spillway.UnsupportedError as error:
        pytest.skip(str(error))
    except spillway.InvalidArgumentError:
        pass
    run(f"""
        import object_store
        os.environ.update(object_store.VARIABLES)
        server = object_store.Server(tempfile.mkdtemp())
        try:
            os.environ["AWS_ENDPOINT_URL"], path = server.endpoint, f"s3://{{server.bucket('bucket')}}/x"
            params, optimizer = made(path, io_timeout=4)
            optimizer.step()
            optimizer.commit()
            os.kill(server.process.pid, signal.SIGSTOP)
            for call in {CALLS[calls]}:
                try:
                    getattr(optimizer, call)()
                except spillway.SpillwayError:
                    pass
                else:
                    assert call != "commit", "a commit needs the store"
            if {calls!r} == "close":
                try:
                    optimizer.close()
                except spillway.SpillwayError as error:
                    assert "did not respond" in str(error)
            os.kill(server.process.pid, signal.SIGCONT)
            optimizer.close()
            params, optimizer = made(path)
            assert optimizer.resumed_step == 1
            optimizer.step()
            optimizer.commit()
        finally:
            server.process.kill()
        print("end")
        """)


def test_a_close_while_threads_step():
    """They end with an error. Daemon threads in torch's code abort an interpreter that ends, with torch's classes too, so they are
    joined."""
    run("""
        params, optimizer = made(tempfile.mkdtemp(), durability="process")
        ends = []

        def steps():
            try:
                while True:
                    optimizer.step()
                    optimizer.state_dict()
            except spillway.InvalidArgumentError as error:
                ends.append(str(error))
        threads = [threading.Thread(target=steps, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        optimizer.close()
        for thread in threads:
            thread.join(60)
        assert len(ends) == 2 and all("closed" in end for end in ends), ends
        print("end")
        """)
