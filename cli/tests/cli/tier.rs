//! Proves `spillway tier`: what each command says and does, that a tier in use and what is no tier are left alone, and
//! that hostile files end with an error.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use spillway::pool::buffer::Buffer;
use spillway::pool::region::Backing;
use spillway::tier::directory::Owner;
use spillway::tier::options::{Mode, TierOptions};
use spillway::tier::{ExtentPlacement, Tier};

use super::support::{Finished, empty_dir, run};
use super::{TIMEOUT, spillway};

/// Bytes of each stream: an optimizer's subgroup, a record, and something with more streams.
const EXTENTS: [(&str, &[usize]); 3] =
    [("subgroup-000000", &[4000, 4000, 4000]), ("record-1", &[20_001]), ("odd\n\u{1b}name", &[5, 0, 9000])];

struct Made {
    root: PathBuf,
    paths: [PathBuf; 2],
}

impl Made {
    /// Two paths, and no tier.
    fn empty(name: &str) -> Made {
        let root = empty_dir(name);
        let paths = ["one", "two"].map(|name| root.join(name));
        paths.iter().for_each(|path| fs::create_dir(path).expect("it is new"));
        Made { root, paths }
    }

    /// A tier with two commits of [`EXTENTS`] on both paths.
    fn new(name: &str) -> Made {
        let made = Made::empty(name);
        let tier = made.open(0, Mode::Create);
        [6, 7].iter().for_each(|step| commit(&tier, *step));
        tier.close(None).expect("it closes");
        made
    }

    fn options(&self, rank: u32) -> TierOptions {
        let owner = Owner { job: "run".to_string(), host: "node".to_string(), rank };
        TierOptions { world: 4, block_bytes: 4096, ..TierOptions::new(owner, self.paths.clone()) }
    }

    fn open(&self, rank: u32, mode: Mode) -> Tier {
        Tier::open(TierOptions { mode, ..self.options(rank) }).expect("it opens")
    }

    fn run(&self, command: &str, before: &[&Path], after: &[&str]) -> Finished {
        let mut tool = spillway();
        tool.args(["tier", command]).args(before).args(&self.paths).args(after);
        run(&mut tool, TIMEOUT)
    }

    fn succeed(&self, command: &str, before: &[&Path], after: &[&str]) -> String {
        let done = self.run(command, before, after);
        assert_eq!(done.code, Some(0), "{command}: {}", done.stderr);
        done.stdout
    }

    fn fails(&self, command: &str, before: &[&Path], after: &[&str]) -> String {
        let done = self.run(command, before, after);
        assert_eq!(done.code, Some(1), "{command}: {} {}", done.stdout, done.stderr);
        assert!(!done.stderr.contains("panicked"), "{}", done.stderr);
        done.stderr
    }

    fn json(&self, command: &str) -> Value {
        serde_json::from_str(&self.succeed(command, &[], &["--json"])).expect("it is JSON")
    }

    fn file(&self, path: usize, name: &str) -> PathBuf {
        self.paths[path].join("run/node/rank-0").join(name)
    }
}

fn bytes_of(step: u64, extent: usize, stream: usize, bytes: usize) -> Vec<u8> {
    let seed = step as usize * 100 + extent * 10 + stream;
    (0..bytes).map(|at| (at.wrapping_mul(31 + seed) >> 3) as u8).collect()
}

fn buffers(sizes: &[usize]) -> Vec<Buffer> {
    sizes.iter().map(|bytes| Buffer::open((*bytes).max(1), Backing::default()).expect("memory")).collect()
}

fn commit(tier: &Tier, step: u64) {
    for (number, (name, sizes)) in EXTENTS.iter().enumerate() {
        let lengths: Vec<u64> = sizes.iter().map(|bytes| *bytes as u64).collect();
        let extent = tier.define(name, &lengths).expect("it is new, or the same");
        let memory = buffers(sizes);
        for (stream, bytes) in sizes.iter().enumerate() {
            memory[stream].span().part(0, *bytes).write(&bytes_of(step, number, stream, *bytes));
        }
        let spans: Vec<_> =
            memory.iter().zip(*sizes).map(|(memory, bytes)| memory.transfer(0, *bytes)).collect();
        let placement = ExtentPlacement::Striped(vec![(0, 2), (1, 100)]);
        let ticket = tier.write(extent, &spans, &placement, None).expect("it begins");
        tier.wait(ticket, Some(TIMEOUT)).expect("it ends");
    }
    tier.commit(step, format!("payload {step}").as_bytes()).expect("it commits");
}

/// The bytes of a stream.
fn read(tier: &Tier, number: usize, stream: usize) -> Vec<u8> {
    let (name, sizes) = EXTENTS[number];
    let lengths: Vec<u64> = sizes.iter().map(|bytes| *bytes as u64).collect();
    let extent = tier.define(name, &lengths).expect("it is the same");
    let memory = buffers(sizes);
    let spans: Vec<_> = memory.iter().zip(sizes).map(|(memory, bytes)| memory.transfer(0, *bytes)).collect();
    tier.wait(tier.read(extent, &spans).expect("it begins"), Some(TIMEOUT)).expect("it ends");
    memory[stream].span().part(0, sizes[stream]).to_vec()
}

fn is_at(tier: &Tier, step: u64) -> bool {
    let whole = |number: usize| {
        let sizes = EXTENTS[number].1;
        (0..sizes.len())
            .all(|stream| read(tier, number, stream) == bytes_of(step, number, stream, sizes[stream]))
    };
    tier.opened().payload == format!("payload {step}").as_bytes() && (0..EXTENTS.len()).all(whole)
}

#[test]
fn ls_shows_steps_extents_and_shares_and_reads_a_tier_in_use() {
    let made = Made::new("tier-ls");
    let report = made.json("ls");
    let tier = &report["tiers"][0];
    assert_eq!(
        (&tier["job"], &tier["rank"], &tier["world"], &tier["step"]),
        (&"run".into(), &0.into(), &4.into(), &7.into())
    );
    assert_eq!(tier["record_bytes"], 9);
    let extents = tier["extents"].as_array().expect("extents");
    assert_eq!((&extents[0]["name"], &extents[0]["bytes"]), (&"subgroup-000000".into(), &12_000.into()));
    assert_eq!(
        (&extents[0]["streams"][1]["name"], &extents[0]["streams"][1]["dtype"]),
        (&"exp_avg".into(), &"F32".into())
    );
    assert!(
        extents[0]["shares"][0].as_f64() > Some(0.6) && extents[0]["shares"][1].as_f64() > Some(0.3),
        "{tier}"
    );
    assert_eq!(extents[2]["name"], EXTENTS[2].0);

    let open = made.open(0, Mode::Resume);
    let text = made.succeed("ls", &[], &[]);
    for words in [
        "run on node, rank 0 of 4: step 7, 3 extents, ",
        " in all, record of ",
        "which runs",
        "odd\\n\\u{1b}name",
        "path 1: ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
    let refused = made.fails("verify", &[], &[]);
    assert!(refused.contains(&format!("{}", std::process::id())), "the owner is named: {refused}");
    for (command, before) in
        [("rm", &[][..]), ("export", &["out.safetensors".as_ref()]), ("snapshot", &["out".as_ref()])]
    {
        made.fails(command, before, if command == "rm" { &["--yes"] } else { &[] });
    }
    open.close(None).expect("it is whole");
    assert!(is_at(&made.open(0, Mode::Resume), 7));
}

#[test]
fn nothing_is_written_by_commands_that_read() {
    let made = Made::new("tier-reads");
    let superblocks = || {
        [0, 1].map(|path| {
            ["superblock.0", "superblock.1"].map(|name| fs::read(made.file(path, name)).expect("it is there"))
        })
    };
    let before = superblocks();
    let out = made.root.join("out.safetensors");
    let said = made.succeed("verify", &[], &[]);
    assert!(said.contains("step 7, 3 extents") && said.contains("no damage"), "{said}");
    made.succeed("export", &[&out], &[]);
    made.succeed("snapshot", &[&made.root.join("snapshot")], &["--bytes-per-second", "10MB"]);
    made.succeed("snapshot", &[&made.root.join("unlimited")], &["--bytes-per-second", "0"]);
    assert!(before == superblocks(), "the step before the last one is still there");
    let options = TierOptions { at_step: Some(6), mode: Mode::Resume, ..made.options(0) };
    assert!(is_at(&Tier::open(options).expect("it goes back"), 6));
}

#[test]
fn verify_goes_on_after_a_tier_without_a_commit_and_one_in_use() {
    let made = Made::new("tier-verify-others");
    made.open(1, Mode::Create).close(None).expect("it closes");
    let last = made.open(3, Mode::Create);
    commit(&last, 9);
    last.close(None).expect("it closes");
    let said = made.succeed("verify", &[], &[]);
    assert_eq!(said.matches("no damage").count(), 3, "{said}");
    assert!(said.contains("rank 1: no commit, 0 extents"), "{said}");
    let used = made.open(2, Mode::Create);
    commit(&used, 5);
    let done = made.run("verify", &[], &[]);
    assert!(done.code != Some(0) && done.stderr.contains("in use"), "{}", done.stderr);
    assert_eq!(done.stdout.matches("no damage").count(), 3, "{}", done.stdout);
}

#[test]
fn verify_names_a_damaged_superblock_in_whose_place_the_other_one_is_used() {
    let made = Made::new("tier-verify-superblock");
    for name in ["superblock.0", "superblock.1"] {
        let path = made.file(0, name);
        let whole = fs::read(&path).expect("it is there");
        let mut bytes = whole.clone();
        bytes[40] ^= 1;
        fs::write(&path, bytes).expect("it is writable");
        let done = made.run("verify", &[], &[]);
        assert_eq!(done.code, Some(1), "{}", done.stdout);
        assert!(done.stdout.contains("DAMAGED") && done.stdout.contains(name), "{}", done.stdout);
        assert!(done.stderr.contains("their other superblocks are whole"), "{}", done.stderr);
        fs::write(&path, whole).expect("it is writable");
    }
    made.succeed("verify", &[], &[]);
}

#[test]
fn verify_names_the_extent_that_is_damaged() {
    let made = Made::new("tier-verify");
    let data = made.file(0, "data");
    let mut bytes = fs::read(&data).expect("it is there");
    let wanted = bytes_of(7, 1, 0, 4096);
    let at = bytes.windows(4096).position(|window| window == wanted).expect("the block is on this path");
    bytes[at + 100] ^= 1;
    fs::write(&data, bytes).expect("it is writable");
    let done = made.run("verify", &[], &[]);
    assert_eq!(done.code, Some(1));
    assert!(done.stdout.contains("DAMAGED") && done.stdout.contains("record-1"), "{}", done.stdout);
    assert!(done.stderr.contains("1 of 1 tiers are damaged"), "{}", done.stderr);
    let refused = made.fails("export", &[&made.root.join("out.safetensors")], &[]);
    assert!(refused.contains("record-1"), "{refused}");
    assert_eq!(fs::read_dir(&made.root).expect("a directory").count(), 2, "nothing is left of it");
    made.succeed("export", &[&made.root.join("out.safetensors")], &["--name", "subgroup-*"]);
}

/// The tensors of a safetensors file by name: dtype, shape and bytes.
fn tensors(path: &Path) -> std::collections::BTreeMap<String, (String, u64, Vec<u8>)> {
    let file = fs::read(path).expect("it is there");
    let length = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + length]).expect("it is JSON");
    let content = &file[8 + length..];
    let named = header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    let read = named.map(|(name, tensor)| {
        let number = |value: &Value| value.as_u64().expect("a number");
        let (from, to) = (number(&tensor["data_offsets"][0]), number(&tensor["data_offsets"][1]));
        let dtype = tensor["dtype"].as_str().expect("a word").to_string();
        (name.clone(), (dtype, number(&tensor["shape"][0]), content[from as usize..to as usize].to_vec()))
    });
    read.collect()
}

#[test]
fn an_export_has_every_tensor_and_is_read_back_into_other_paths() {
    let made = Made::new("tier-export");
    let out = made.root.join("out.safetensors");
    let said = made.succeed("export", &[&out], &[]);
    assert!(said.contains("step 7 of run on node, rank 0"), "{said}");
    let found = tensors(&out);
    assert_eq!(found["subgroup-000000.exp_avg"], ("F32".to_string(), 1000, bytes_of(7, 0, 1, 4000)));
    assert_eq!(found["record-1"], ("U8".to_string(), 20_001, bytes_of(7, 1, 0, 20_001)));
    assert_eq!(found[&format!("{}.2", EXTENTS[2].0)].2, bytes_of(7, 2, 2, 9000));
    assert!(made.fails("export", &[&out], &[]).contains("choose a name that does not exist"));

    // Other paths, one of them, and another rank.
    let other = Made::empty("tier-import");
    let from = |source: &Path, more: &[&str]| {
        let mut tool = spillway();
        tool.args(["tier", "import"]).arg(source).arg(&other.paths[1]).args(more);
        run(&mut tool, TIMEOUT)
    };
    assert!(from(&out, &[]).stderr.contains("there is no tier"));
    let done = from(&out, &["--create", "--host", "node", "--rank", "2"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(from(&out, &["--create", "--host", "node", "--rank", "2"]).stderr.contains("leave out --create"));
    let single = TierOptions {
        paths: TierOptions::new(other.options(2).owner, [other.paths[1].clone()]).paths,
        ..other.options(2)
    };
    let tier = Tier::open(TierOptions { mode: Mode::Resume, ..single }).expect("it is there");
    assert!(is_at(&tier, 7) && tier.opened().step == Some(7));
    tier.close(None).expect("it closes");

    // One extent of an older state into a newer one: the step stays.
    let tier = made.open(0, Mode::Resume);
    commit(&tier, 8);
    tier.close(None).expect("it closes");
    made.succeed("import", &[&out], &["--name", "record-?"]);
    let tier = made.open(0, Mode::Resume);
    assert_eq!(tier.opened().step, Some(8));
    assert!(read(&tier, 1, 0) == bytes_of(7, 1, 0, 20_001) && read(&tier, 0, 0) == bytes_of(8, 0, 0, 4000));
    tier.close(None).expect("it closes");
    // A directory restores all.
    let snapshot = made.root.join("snapshot");
    let before = Made::new("tier-before");
    before.succeed("snapshot", &[&snapshot], &[]);
    made.succeed("import", &[&snapshot], &[]);
    assert!(is_at(&made.open(0, Mode::Resume), 7));
}

#[test]
fn a_range_takes_elements_and_a_foreign_file_becomes_extents() {
    let made = Made::new("tier-range");
    let out = made.root.join("part.safetensors");
    made.succeed("export", &[&out], &["--range", "998:5000", "--name", "subgroup-*", "--name", "record-*"]);
    let found = tensors(&out);
    assert_eq!(
        found["subgroup-000000.param"],
        ("F32".to_string(), 2, bytes_of(7, 0, 0, 4000)[3992..].to_vec())
    );
    assert_eq!(found["record-1"].2, bytes_of(7, 1, 0, 20_001)[998..5000]);
    let refused = made.fails("import", &[&out], &[]);
    assert!(refused.contains("record-1"), "its extent has other streams: {refused}");
    assert!(is_at(&made.open(0, Mode::Resume), 7), "nothing was changed");

    let other = Made::empty("tier-foreign");
    other.fails("import", &[&out], &["--create"]);
    other.succeed("import", &[&out], &["--create", "--job", "new", "--host", "node"]);
    let names: Vec<Value> = other.json("ls")["tiers"][0]["extents"].as_array().expect("extents").clone();
    assert_eq!(names.len(), 4, "{names:?}");
    for (options, words) in [
        (&["--dtype", "F32", "--name", "record-1"][..], "does not fit"),
        (&["--dtype", "F3"], "is none of safetensors"),
        (&["--name", "nobody"], "no extent of"),
    ] {
        let refused = made.fails("export", &[&made.root.join("more.safetensors")], options);
        assert!(refused.contains(words), "{options:?}: {refused}");
    }
}

#[test]
fn an_import_goes_on_with_the_tier_that_an_interrupted_one_left_and_takes_a_path_given_twice() {
    let made = Made::new("tier-interrupted");
    let out = made.root.join("out.safetensors");
    made.succeed("export", &[&out], &[]);
    let left = Made::empty("tier-left");
    left.open(0, Mode::Create).close(None).expect("it closes");
    assert!(left.fails("import", &[&out], &[]).contains("nothing was committed"));
    left.succeed("import", &[&out], &["--create", "--host", "node"]);
    assert!(is_at(&left.open(0, Mode::Resume), 7));
    assert!(left.fails("import", &[&out], &["--create", "--host", "node"]).contains("leave out --create"));

    let other = Made::empty("tier-twice");
    let again = other.paths[0].join("../one");
    let again = again.to_str().expect("it is UTF-8");
    other.succeed("import", &[&out], &["--create", "--host", "node", again]);
    assert!(is_at(&other.open(0, Mode::Resume), 7));
    // The parts are the same ones, whatever their paths are called.
    let mut tool = spillway();
    tool.args(["tier", "rm", "--yes", again, "."]).current_dir(&other.paths[1]);
    let done = run(&mut tool, TIMEOUT);
    assert!(done.code == Some(0) && !done.stdout.contains("stay"), "{} {}", done.stdout, done.stderr);
}

#[test]
fn hostile_imports_end_with_an_error_and_change_nothing() {
    let made = Made::new("tier-hostile-import");
    let file = made.root.join("file.safetensors");
    let tensor = |name: &str, bytes: u64| {
        format!("{{{name:?}:{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}")
    };
    let manifest = |rank: u32, step: &str, payload: &str| {
        let text = format!(
            "{{\"format\":\"spillway tier export\",\"version\":1,\"job\":\"../../x\",\"rank\":{rank},\"world\":0,\
             \"step\":{step},\"payload\":{payload:?},\"extents\":[],\"checksum\":\"OWN\"}}"
        );
        format!("{{\"__metadata__\":{{\"spillway\":{}}}}}", Value::from(text))
    };
    let import = |length: u64, header: &str| {
        let length = if length == 0 { header.len() as u64 } else { length };
        let content: &[u8] = if header.contains("U8") { b"1234" } else { b"" };
        fs::write(&file, [&length.to_le_bytes(), header.as_bytes(), content].concat())
            .expect("it is writable");
        made.fails("import", &[&file], &[])
    };
    let long = "n".repeat(300);
    let (end, no_payload) = (u64::MAX.to_string(), manifest(0, "5", "zz"));
    let cases = [
        (1 << 63, "{}".to_string(), "its header has 9223372036854775808 bytes"),
        (2, "{}".to_string(), "it has no extents"),
        (0, tensor("a", 1 << 62), "its bytes are 0 to 4611686018427387904 of 4"),
        (0, tensor(&long, 4), "has 300 bytes, but the limit is 255"),
        (0, tensor("", 4), "is empty"),
        (0, tensor("a\u{1}b", 4).replace("\\u{1}", "\\u0000"), "contains a NUL"),
        (0, no_payload, "not hexadecimal"),
        (0, manifest(u32::MAX, &end, ""), "pass --rank 0 to import it there"),
    ];
    for (length, header, words) in cases {
        let mut refused = import(length, &header);
        // The refusal of an edited manifest states the checksum that an attacker would write.
        if let Some((_, told)) = refused.split_once("its checksum is ") {
            let own = told.split(',').next().expect("a number");
            refused = import(length, &header.replace("OWN", own));
        }
        assert!(refused.contains(words), "{words}: {refused}");
        made.fails("import", &[&file], &["--create", "--job", "other"]);
    }
    let refused = made.fails("import", &["/dev/zero".as_ref()], &[]);
    assert!(refused.contains("neither a directory nor a regular file"), "{refused}");
    assert!(is_at(&made.open(0, Mode::Resume), 7));
    assert_eq!(made.json("ls")["tiers"].as_array().map(Vec::len), Some(1), "no new tier is left");
}

#[test]
fn rm_removes_tiers_and_extents_but_nothing_else() {
    let made = Made::new("tier-rm");
    made.open(3, Mode::Create).close(None).expect("it closes");
    assert!(made.fails("rm", &[], &[]).contains("is needed to remove run on node, rank 0: step 7"));
    assert!(made.fails("export", &[&made.root.join("out")], &[]).contains("has 2 tiers"));
    let said = made.succeed("rm", &[], &["--rank", "0", "--name", "record-*", "--yes"]);
    assert!(said.contains("record-1"), "{said}");
    let tier = made.json("ls")["tiers"][0].clone();
    assert_eq!((tier["extents"].as_array().map(Vec::len), &tier["step"]), (Some(2), &7.into()));
    made.succeed("rm", &[], &["--yes", "--job", "run", "--host", "node"]);
    assert!(made.paths.iter().all(|path| fs::read_dir(path).expect("a directory").count() == 0));

    // Directories with such names that no tier made.
    let precious = made.file(0, "superblock.0");
    fs::create_dir_all(precious.parent().expect("a directory")).expect("it is new");
    fs::write(&precious, "a poem").expect("it is new");
    assert!(made.fails("rm", &[], &["--yes"]).contains("there is no tier"));
    assert_eq!(fs::read_to_string(&precious).expect("it is there"), "a poem");
    assert!(made.fails("ls", &[], &["--job", "nobody"]).contains("there is no tier of job \"nobody\""));
}

#[test]
fn damaged_files_are_told_and_never_crash_a_command() {
    let made = Made::new("tier-hostile");
    let whole = [0, 1].map(|path| {
        ["superblock.0", "superblock.1"]
            .map(|name| (made.file(path, name), fs::read(made.file(path, name)).expect("it is there")))
    });
    let files = || whole.iter().flatten();
    let mut random = 12_345_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let out = made.root.join("out.safetensors");
    for round in 0..24 {
        for (path, bytes) in files() {
            let mut bytes = bytes.clone();
            match round % 4 {
                0 => bytes.truncate(next(bytes.len())),
                1 => bytes.iter_mut().for_each(|byte| *byte = 0xff),
                // A length of the table near 2^63.
                2 => bytes[24..32].copy_from_slice(&(u64::MAX >> 1).to_le_bytes()),
                _ => (0..8).for_each(|_| {
                    let at = next(bytes.len());
                    bytes[at] ^= 1 << next(8);
                }),
            }
            fs::write(path, bytes).expect("it is writable");
        }
        for (command, before) in [("ls", &[][..]), ("verify", &[]), ("export", &[&*out])] {
            let done = made.run(command, before, &[]);
            assert!(matches!(done.code, Some(0 | 1)) && !done.stderr.contains("panicked"), "{}", done.stderr);
        }
        let _ = fs::remove_file(&out);
    }
    files().for_each(|(path, bytes)| fs::write(path, &bytes[..100]).expect("it is writable"));
    let said = made.succeed("ls", &[], &[]);
    assert!(said.contains("damaged:") && said.contains("superblock.1"), "{said}");
    assert!(made.run("verify", &[], &[]).stdout.contains("DAMAGED"));
    // It is a tier all the same: the files say so.
    made.succeed("rm", &[], &["--yes"]);
    assert!(made.paths.iter().all(|path| fs::read_dir(path).expect("a directory").count() == 0));
}

#[test]
fn all_ranks_are_copied_at_the_step_that_they_have_in_common_and_nothing_of_them_changes() {
    let made = Made::new("tier-all-ranks");
    let refused = made.fails("export", &[&made.root.join("too-few")], &["--all-ranks"]);
    assert!(refused.contains("run/HOST/rank-1"), "{refused}");
    for rank in 1..4 {
        let tier = made.open(rank, Mode::Create);
        // The last rank was killed before its second commit.
        (6..if rank == 3 { 7 } else { 8 }).for_each(|step| commit(&tier, step));
        tier.close(None).expect("it closes");
    }
    let before = everything(&made.paths[0]);
    let [exported, snapshot] = ["exported", "snapshot"].map(|name| made.root.join(name));
    let told = made.succeed("export", &[&exported], &["--all-ranks"]);
    assert!(told.contains("step 6 of 4 ranks"), "{told}");
    made.succeed("snapshot", &[&snapshot], &["--all-ranks"]);
    assert!(made.fails("export", &[&exported], &["--all-ranks"]).contains("exported"));
    assert!(everything(&made.paths[0]) == before, "a copy has changed the tiers");

    for whole in [&exported, &snapshot] {
        let refused =
            Made::empty("tier-all-ranks-whole").fails("import", &[whole], &["--create", "--host", "node"]);
        assert!(
            refused.contains("holds several ranks; name what it has of one, such as rank-0"),
            "{refused}"
        );
    }
    let index: Value =
        serde_json::from_slice(&fs::read(exported.join("index.json")).expect("it is there")).expect("JSON");
    assert_eq!((&index["step"], &index["world"]), (&6.into(), &4.into()));
    let files: Vec<_> =
        index["ranks"].as_array().expect("ranks").iter().map(|one| one["file"].clone()).collect();
    assert_eq!(files, (0..4).map(|rank| format!("rank-{rank}.safetensors")).collect::<Vec<_>>());
    for rank in 0..4 {
        let forms =
            [exported.join(format!("rank-{rank}.safetensors")), snapshot.join(format!("rank-{rank}"))];
        for (number, form) in forms.iter().enumerate() {
            let copy = Made::empty(&format!("tier-all-ranks-{rank}-{number}"));
            copy.succeed("import", &[form], &["--create", "--host", "node"]);
            assert!(is_at(&copy.open(rank, Mode::Resume), 6), "rank {rank}");
        }
    }
}

#[test]
fn commits_of_two_rounds_with_one_step_are_told_apart() {
    let made = Made::new("tier-two-rounds");
    let open = |rank: u32| made.open(rank, if rank == 0 { Mode::Resume } else { Mode::Create });
    let round = |tier: &Tier, payload: &str| tier.commit(8, payload.as_bytes()).expect("it commits");
    for rank in 0..4 {
        let tier = open(rank);
        commit(&tier, 7);
        round(&tier, if rank == 0 { "the first round" } else { "the second round" });
        tier.close(None).expect("it closes");
    }
    // A step before that is common, and an older one than what each rank has.
    let to = made.root.join("older");
    assert!(made.succeed("snapshot", &[&to], &["--all-ranks"]).contains("step 7"));

    for rank in 0..4 {
        let tier = made.open(rank, Mode::Resume);
        round(&tier, if rank == 0 { "the first round" } else { "the second round" });
        tier.close(None).expect("it closes");
    }
    let said = made.fails("snapshot", &[&made.root.join("none")], &["--all-ranks"]);
    assert!(said.contains("different commits of step 8") && said.contains("--rank"), "{said}");

    let tier = made.open(0, Mode::Resume);
    round(&tier, "the second round");
    tier.close(None).expect("it closes");
    assert!(made.succeed("export", &[&made.root.join("same")], &["--all-ranks"]).contains("step 8"));
}

#[test]
fn what_an_interrupted_copy_has_left_is_named_with_a_cure() {
    let made = Made::new("tier-left");
    for rank in 1..4 {
        let tier = made.open(rank, Mode::Create);
        [6, 7].iter().for_each(|step| commit(&tier, *step));
        tier.close(None).expect("it closes");
    }
    let to = made.root.join("copy");
    fs::create_dir(made.root.join("copy.partial")).expect("it is new");
    let said = made.fails("snapshot", &[&to], &["--all-ranks"]);
    assert!(said.contains("copy.partial exists; remove it") && !to.exists(), "{said}");
}

/// Every file below a directory, with its bytes.
fn everything(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("it is a directory") {
        let path = entry.expect("it can be read").path();
        match path.is_dir() {
            true => found.extend(everything(&path)),
            false => found.push((path.clone(), fs::read(&path).expect("it can be read"))),
        }
    }
    found.sort();
    found
}
