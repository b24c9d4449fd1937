"""Proves that arguments of a tier that the library would misread are errors that name them, and that errors keep their
details in another process."""

import copy
import pathlib
import pickle
import re

import pytest

import spillway
from spillway.tier import steps


@pytest.fixture
def tier(tmp_path):
    with spillway.Tier([tmp_path], job="arguments") as opened:
        yield opened


@pytest.mark.parametrize("step", [-1, 1 << 64, 1.5, "1"])
def test_a_step_that_is_no_number_of_64_bits_is_refused(tier, step):
    with pytest.raises(spillway.InvalidArgumentError, match="step"):
        tier.commit(step)


@pytest.mark.parametrize("given", [[], {}, None, 3, "other"])
@pytest.mark.parametrize("argument", ["mode", "durability", "backend"])
def test_a_choice_is_one_of_its_names(tmp_path, argument, given):
    with pytest.raises(spillway.InvalidArgumentError, match=f"Tier: {argument} is {re.escape(repr(given))}; pass one of"):
        spillway.Tier([tmp_path], job="arguments", **{argument: given})


def test_a_payload_is_bytes_of_any_kind(tier, tmp_path):
    with pytest.raises(spillway.InvalidArgumentError, match="payload"):
        tier.commit(1, "text")
    tier.commit(1, bytearray(b"kept"))
    tier.close()
    with spillway.Tier([tmp_path], job="arguments") as again:
        assert again.opened.payload == b"kept"


def test_sizes_and_counts_of_blocks_fit_their_fields(tier):
    with pytest.raises(spillway.InvalidArgumentError, match="stream_bytes"):
        tier.define("weights", [(1 << 64) + 40])
    extent = tier.define("weights", [40])
    with pytest.raises(spillway.InvalidArgumentError, match="path_blocks"):
        tier.put_striped(extent, [bytearray(40)], [-1])


def test_a_path_with_a_nul_is_refused(tmp_path):
    with pytest.raises(spillway.InvalidArgumentError, match="NUL"):
        spillway.Tier([f"{tmp_path}\0other"], job="arguments")


def test_errors_keep_their_details_when_they_are_copied(tmp_path):
    with pytest.raises(spillway.NotFoundError) as raised:
        spillway.Tier([tmp_path / "missing"], job="arguments")
    error = raised.value
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error) and str(other) == str(error) and other.status == error.status
        assert (other.errno, other.filename) == (error.errno, error.filename)


@pytest.mark.parametrize("paths", ["/", b"/", pathlib.Path("/")])
def test_paths_that_are_one_path_are_an_error_instead_of_directories_of_its_letters(paths):
    for call in (spillway.Tier, steps):
        with pytest.raises(spillway.InvalidArgumentError, match="Tier: paths is .*; pass a list of paths"):
            call(paths, job="test")
