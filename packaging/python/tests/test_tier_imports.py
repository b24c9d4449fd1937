"""Imports beside commits of other threads and beside an open Swap, and what a failed import leaves."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import threading

import numpy as np
import pytest
import torch

import spillway
from spillway import swap as swap_module

SIZES = [4096] * 10
TOOL = pathlib.Path(os.environ.get("SPILLWAY_LIBRARY", "")).parent / "spillway"


@pytest.fixture
def folders(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    return tmp_path


def open_swap(tier, cached):
    plans = (swap_module.plan_budget(SIZES, host_memory=budget, paths=1) for budget in range(4 * 49152, 20 * 49152, 4096))
    return spillway.Swap(tier, SIZES, host_memory=next(plan.host_bytes for plan in plans if plan.cached == cached))


def firsts(swap):
    found = []
    for subgroup, size in enumerate(SIZES):
        param = np.zeros(size, np.float32)
        swap.read(subgroup, param, None, None)
        found.append(float(param[0]))
    return found


@pytest.mark.parametrize("cached", [1, 3, 10])
def test_an_update_takes_imported_states_over_by_a_rollback(folders, cached):
    with spillway.Tier([folders / "a"], job="j") as tier, open_swap(tier, cached) as swap:
        swap.fill([(np.ones(size, np.float32), None, None) for size in SIZES])
        adam = spillway.Adam(lr=1e-2)

        def step():
            swap.step(adam, [(torch.ones(size), None) for size in SIZES])

        step()
        swap.commit(1)
        one = firsts(swap)
        tier.export_tensors(folders / "one.safetensors").wait()
        step()
        swap.commit(2)
        assert tier.import_from(folders / "one.safetensors") == 1
        for call in (step, lambda: swap.commit(3), lambda: swap.commit(3, wait=False), lambda: firsts(swap), lambda: swap.begin(adam)):
            with pytest.raises(spillway.BusyError, match="an import has replaced the states"):
                call()
        swap.rollback()
        assert firsts(swap) == one
        step()
        swap.commit(2)
    with spillway.Tier([folders / "a"], job="j") as tier, open_swap(tier, cached) as swap:
        assert len(set(firsts(swap))) == 1


def test_a_commit_of_another_thread_never_has_a_part_of_an_import(folders):
    size, count = 1 << 18, 12
    with spillway.Tier([folders / "a"], job="j", durability="process") as tier:
        extents = [tier.define(f"e{number:02}", [size]) for number in range(count)]

        def fill(value):
            for extent in extents:
                tier.wait(tier.put(extent, [bytearray([value]) * size]))

        def values():
            found, array = set(), bytearray(size)
            for extent in extents:
                tier.wait(tier.get(extent, [array]))
                found.add(array[-1])
            return found

        fill(1)
        tier.commit(1)
        tier.export_tensors(folders / "one.safetensors").wait()
        refused = 0
        for attempt in range(20):
            fill(2)
            tier.commit(2)
            ended = []

            def commits():
                while not ended:
                    try:
                        tier.commit(3)
                    except spillway.BusyError:
                        pass

            thread = threading.Thread(target=commits)
            thread.start()
            try:
                tier.import_from(folders / "one.safetensors")
            except spillway.BusyError:
                # Another commit was in progress when the import began.
                refused += 1
            ended.append(attempt)
            thread.join()
            assert len(values()) == 1
            tier.rollback()
            assert len(values()) == 1
        assert refused < 20


def exported(folder, size):
    with spillway.Tier([folder], job="source") as tier, spillway.Swap(tier, [size, size]) as swap:
        swap.fill([(np.ones(size, np.float32), None, None)] * 2)
        swap.commit(1)
        file = folder / "e.safetensors"
        tier.export_tensors(file).wait()
        return file


def test_a_failed_import_defines_nothing(folders):
    wrong, right = exported(folders / "a", 2000), exported(folders / "b", 1000)
    damaged = bytearray(wrong.read_bytes())
    damaged[-1] ^= 1
    wrong.write_bytes(damaged)
    with spillway.Tier([folders / "c"], job="j") as tier:
        with pytest.raises(spillway.CorruptError):
            tier.import_from(wrong)
        assert tier.extents() == []
        assert tier.import_from(right) == 1
        assert len(tier.extents()) == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes links of another user")
def test_a_link_of_another_user_to_an_export_is_not_followed(folders):
    with spillway.Tier([folders / "a"], job="j") as tier:
        tier.wait(tier.put(tier.define("w", [5]), [bytearray(b"12345")]))
        tier.commit(7)
        tier.export(folders / "export")
    with spillway.Tier([folders / "b"], job="other") as tier:
        link = folders / "link"
        link.symlink_to(folders / "export")
        assert tier.import_from(link) == 7
        os.lchown(link, 65534, 65534)
        with pytest.raises(spillway.TierError, match="symbolic link of user 65534, which is not followed"):
            tier.import_from(link)


@pytest.mark.skipif(os.getuid() != 0 or not TOOL.is_file(), reason="only root makes files that another user may read alone; needs the tool")
def test_the_tool_verifies_a_tier_that_it_may_only_read():
    with tempfile.TemporaryDirectory() as folder:
        # The other user may not run the tool where it was built.
        tool, tier = shutil.copy(TOOL, folder), pathlib.Path(folder, "tier")
        os.chmod(folder, 0o755)
        tier.mkdir()
        with spillway.Tier([tier], job="j") as opened:
            opened.wait(opened.put(opened.define("w", [5000]), [bytearray(5000)]))
            opened.commit(7)
        for found in [tier, *tier.rglob("*")]:
            os.chown(found, 65534, 65534)
            found.chmod(0o500 if found.is_dir() else 0o400)
        done = subprocess.run([tool, "tier", "verify", tier], capture_output=True, text=True, user=65534, group=65534, extra_groups=[])
        assert done.returncode == 0 and "step 7, 1 extents, 1 blocks" in done.stdout, done
        (data,) = tier.rglob("data")
        data.write_bytes(data.read_bytes().replace(bytes(4096), b"x" * 4096))
        done = subprocess.run([tool, "tier", "verify", tier], capture_output=True, text=True, user=65534, group=65534, extra_groups=[])
        assert done.returncode == 1 and "1 of 1 tiers are damaged" in done.stderr, done
