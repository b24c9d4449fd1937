"""OptimizerStateStore in directories that other users write to: whatever is there, load_from() ends, names the file, and changes nothing;
save_to() follows no link and leaves files that only the user may read."""

import json
import math
import os
import random
import resource
import shutil
import stat
import zlib

import pytest
import torch
from hybrid import same
from test_store import Model, stored, train

import spillway
from spillway import _files
from spillway.megatron import _saved

MANIFEST, TENSORS = "rank-00000.json", "rank-00000-step-2.safetensors"


@pytest.fixture
def saved(tmp_path):
    """A store at step 2 with a saved directory; the check that nothing of it has changed."""
    model, folder = Model(), tmp_path / "saved"
    with stored(model) as store:
        train(store, model, range(2))
        store.save_to(folder)
        states = list(store._states())

        def unchanged():
            now = list(store._states())
            assert (store.steps, store.committed_step) == (2, 2)
            assert same([part for _, part in states], [part for _, part in now])
            assert same(model.copies(), weights)

        weights = model.copies()
        yield store, folder, unchanged
        train(store, model, [2])


def signed(content):
    """A manifest whose checksum is right."""
    body = {key: content[key] for key in ("step", "file", "spans")}
    return json.dumps({"format": 1, "checksum": zlib.crc32(json.dumps(body, sort_keys=True).encode()), **body})


def rewritten(folder, change):
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(signed(content))


def spanned(place, value):
    """A change of one number of the first span."""

    def change(content):
        next(iter(content["spans"].values()))[place] = value

    return change


def two_of_one(content):
    first, second = list(content["spans"])[:2]
    content["spans"][second] = list(content["spans"][first])


CHANGES = {
    **{
        f"the step {step!r}": lambda content, step=step: content.update(step=step)
        for step in (-5, 1 << 64, (1 << 63) - 1, 1e308, 2.0, math.nan, math.inf, True, "2", None, [2])
    },
    **{
        f"the file {file[:20]!r}": lambda content, file=file: content.update(file=file)
        for file in (
            "",
            ".",
            "..",
            "/",
            "x" * 5000,
            "rank-00000-step-2.safetensors\0",
            "../saved/" + TENSORS,
            "/dev/zero",
            "/etc/passwd",
            MANIFEST,
        )
    },
    **{f"a file that is a {type(file).__name__}": lambda content, file=file: content.update(file=file) for file in (3, None, [TENSORS])},
    **{f"the offset {offset!r}": spanned(0, offset) for offset in (-1, 1 << 63, (1 << 63) - 1, 1 << 62, 1e3, True, "8")},
    **{f"the length {length!r}": spanned(1, length) for length in (-4, 1 << 63, 4e3)},
    **{f"the checksum {checksum!r}": spanned(2, checksum) for checksum in (-1, 1 << 32, 0.5)},
    "overlapping tensors": two_of_one,
    "spans that are a list": lambda content: content.update(spans=[]),
    "a span of two numbers": lambda content: content["spans"].update({"a.weight.param": [8, 4000]}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_with_a_right_checksum_and_wrong_values_is_damage_and_changes_nothing(saved, name):
    store, folder, unchanged = saved
    rewritten(folder, CHANGES[name])
    with pytest.raises(spillway.SpillwayError) as raised:
        store.load_from(folder)
    assert type(raised.value) is (spillway.NoStateError if name.startswith("spans") and "list" not in name else spillway.CorruptError), (
        raised.value
    )
    assert len(str(raised.value)) < 1000
    unchanged()


def a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def a_link_to(target):
    def plant(path):
        path.unlink()
        path.symlink_to(target)

    return plant


def a_sparse_file(path):
    os.truncate(path, 50 << 30)


def a_directory(path):
    path.unlink()
    path.mkdir()


def deep(path):
    path.write_text('{"format": ' + "[" * 200_000 + "]" * 200_000 + "}")


PLANTS = {
    "a FIFO": a_fifo,
    "a link to /dev/zero": a_link_to("/dev/zero"),
    "a link to itself": a_link_to(MANIFEST),
    "a directory": a_directory,
    "nothing": lambda path: path.write_bytes(b""),
    "a sparse file": a_sparse_file,
    "deep JSON": deep,
    "a long number": lambda path: path.write_text('{"format": ' + "1" * 1_000_000 + "}"),
    "no UTF-8": lambda path: path.write_bytes(b'{"format": "\xff"}'),
    "UTF-16": lambda path: path.write_text('{"format": 1}', "utf-16"),
    "a list": lambda path: path.write_text("[1, 2]"),
    "null": lambda path: path.write_text("null"),
}


# A file of tensors may be larger than they are.
@pytest.mark.parametrize(
    "file, name", [(file, name) for file in (MANIFEST, TENSORS) for name in PLANTS if (file, name) != (TENSORS, "a sparse file")]
)
def test_a_planted_file_is_damage_at_once(saved, file, name):
    store, folder, unchanged = saved
    PLANTS[name](folder / file)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(spillway.CorruptError, match="rank-00000"):
        store.load_from(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000, "more than 200 MB were read"
    unchanged()


def test_a_load_whose_commit_fails_returns_to_the_last_commit(saved, monkeypatch):
    store, folder, unchanged = saved
    rewritten(folder, lambda content: content.update(step=7, file=TENSORS))
    committed = store._tiered.swap._commit

    def full(*arguments):
        raise spillway.IoError("no room")

    monkeypatch.setattr(store._tiered.swap, "_commit", full)
    with pytest.raises(spillway.IoError, match="no room"):
        store.load_from(folder)
    monkeypatch.setattr(store._tiered.swap, "_commit", committed)
    unchanged()
    assert store.load_from(folder) and (store.steps, store.committed_step) == (7, 7)
    store.load_from(folder)
    store._set_steps(2)
    store.commit()


def test_damaged_directories_of_all_kinds_change_nothing(saved):
    """Random damage: bytes, values, lengths, files. A load that is accepted has the states that were saved."""
    store, folder, unchanged = saved
    states = dict(store._states())
    copy = folder.parent / "copy"
    rounds, accepted = int(os.environ.get("SPILLWAY_FUZZ_ROUNDS", 200)), 0
    for seed in range(rounds):
        shutil.copytree(folder, copy)
        damage(copy, random.Random(seed))
        try:
            store.load_from(copy)
        except spillway.SpillwayError as error:
            assert isinstance(error, (spillway.CorruptError, spillway.NoStateError, spillway.InvalidArgumentError)), (seed, error)
            unchanged()
        else:
            accepted += 1
            assert same(list(states.values()), [part for _, part in store._states()]), seed
            store._set_steps(2)
            store.commit()
        shutil.rmtree(copy)
    assert accepted < rounds / 2


def damage(folder, chance):
    manifest, tensors = folder / MANIFEST, folder / TENSORS
    for _ in range(chance.randrange(1, 3)):
        kind = chance.randrange(8)
        if kind == 0 and manifest.exists():
            flip(manifest, chance)
        elif kind == 1 and tensors.exists():
            flip(tensors, chance)
        elif kind == 2 and tensors.exists():
            os.truncate(tensors, chance.randrange(tensors.stat().st_size + 100))
        elif kind == 3 and manifest.exists():
            os.truncate(manifest, chance.randrange(manifest.stat().st_size))
        elif kind == 4:
            chance.choice([manifest, tensors]).unlink(missing_ok=True)
        elif kind == 5:
            (folder / f"rank-{chance.randrange(3):05d}.json").write_bytes(chance.randbytes(chance.randrange(200)))
        else:
            try:
                content = json.loads(manifest.read_text())
                name, value = chance.choice(list(content["spans"])), chance.choice([-1, 0, 1, 8, 1 << 40, 1 << 70, None, "x", 0.5, [], {}])
                chance.choice(
                    [
                        lambda: content["spans"][name].__setitem__(chance.randrange(3), value),
                        lambda: content["spans"].pop(name),
                        lambda: content["spans"].update({name + "x": content["spans"].pop(name)}),
                        lambda: content.update({chance.choice(["step", "file", "spans"]): value}),
                        lambda: content["spans"][name].append(3),
                    ]
                )()
                manifest.write_text(signed(content))
            except (OSError, LookupError, ValueError, TypeError, AttributeError):
                pass


def flip(path, chance):
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def test_a_save_follows_no_link_and_leaves_private_files(saved, tmp_path):
    store, _, _ = saved
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    folder.mkdir()
    folder.chmod(0o777)
    for name in (MANIFEST, TENSORS):
        (folder / f"{name}.part").symlink_to(victim)
        (folder / name).symlink_to(victim)
    umask = os.umask(0)
    try:
        store.save_to(folder)
        store.save_to(tmp_path / "new")
    finally:
        os.umask(umask)
    assert victim.read_text() == "precious"
    assert sorted(os.listdir(folder)) == sorted([MANIFEST, TENSORS])
    for path in (*folder.iterdir(), *(tmp_path / "new").iterdir()):
        found = path.lstat()
        assert stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    with pytest.raises(FileNotFoundError):
        store.save_to(tmp_path / "a disk that is not mounted" / "saved")
    assert store.load_from(folder)


@pytest.mark.parametrize(
    "name, master, reason",
    [
        ("a.weight", torch.tensor(7.0), "torch.float32 of 1 elements; pass float32 of 1000"),
        ("a.weight", torch.zeros(1000, dtype=torch.float64), "torch.float64 of 1000"),
        ("a.weight", torch.zeros(1000, dtype=torch.int32), "torch.int32 of 1000"),
        ("a.weight", torch.zeros(999), "of 999 elements"),
        ("a.weight", [0.0] * 1000, "is a list; pass a float32 tensor"),
        ("a.weight", torch.zeros(1000, device="meta"), "has no memory"),
        ("a.weight", torch.zeros(1000).to_sparse(), "float32 of 1000"),
        ("x", torch.zeros(1), "no shard 'x'"),
        (3, torch.zeros(1), "no shard 3"),
    ],
)
def test_masters_that_do_not_fit_are_named_and_change_nothing(saved, name, master, reason):
    store, _, unchanged = saved
    with pytest.raises(spillway.InvalidArgumentError, match=reason):
        store.refresh({"b.bias": torch.ones(33), name: master})
    unchanged()


def test_json_has_a_limit_of_levels_and_unique_keys():
    for accepted in (b"[" * 300 + b"]" * 300, b'"' + b"[" * 400 + b'"', b'{"a": "\\"[["}', b"[[], {}]"):
        _files.parse_json(accepted)
    for refused in (
        b"[" * 301 + b"]" * 301,
        b'{"a":' * 400 + b"1" + b"}" * 400,
        b"[" * 10_000_000,
        b"[NaN]",
        b"[Infinity]",
        b"9" * 5000,
        b"",
        b"\xff",
        b'{"a": 1, "a": 1}',
        b'[{"b": {"a": 1, "\\u0061": 2}}]',
    ):
        with pytest.raises(ValueError):
            _files.parse_json(refused)


def test_files_are_read_only_where_they_are_regular(tmp_path):
    (tmp_path / "file").write_text("x")
    with _files.open_regular(tmp_path / "file") as file:
        assert file.read() == b"x"
    (tmp_path / "link").symlink_to("file")
    for path in (tmp_path / "link", tmp_path, "/dev/null"):
        with pytest.raises(spillway.CorruptError, match="no regular file"):
            _files.open_regular(path)
    with pytest.raises(FileNotFoundError):
        _saved._files.open_regular(tmp_path / "none")
    with pytest.raises(FileExistsError):
        _files.create(tmp_path / "link")
    _files.create(tmp_path / "link", replace=True).close()
    assert (tmp_path / "file").read_text() == "x" and not (tmp_path / "link").is_symlink()
