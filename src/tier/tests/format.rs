//! On-disk format: committed bytes stay readable in later releases, and arbitrary bytes are rejected safely.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use crate::checksum;
use crate::tier::blocks::check_header;
use crate::tier::catalog::Subject;
use crate::tier::extent::{Chunk, Shape, Version};
use crate::tier::format::{ChunkHeader, ExtentRecord, MAX_PATHS, PathRecord, Superblock, SuperblockHeader};

/// Golden bytes of this name, as the first release wrote them. `SPILLWAY_BLESS=1` writes the bytes of a new format
/// version.
fn golden(name: &str, bytes: &[u8]) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("ffi_tests/golden").join(name);
    if std::env::var_os("SPILLWAY_BLESS").is_some() && !path.exists() {
        std::fs::write(&path, bytes).unwrap();
    }
    std::fs::read(path).unwrap()
}

fn header() -> ChunkHeader {
    ChunkHeader {
        tier: 0x0011_2233_4455_6677_8899_AABB_CCDD_EEFF,
        session: 0x0102_0304_0506_0708,
        extent: 3,
        path: 1,
        generation: 42,
        first: 7,
        offset: 1 << 33,
        block_bytes: 1 << 20,
        checksums: vec![u64::MAX, 0, 0x1234_5678_9ABC_DEF0],
    }
}

fn superblock() -> Superblock {
    let shape = Shape::new(&[10_000, 0, 4096], 4096).unwrap();
    let chunk =
        |path, offset, first, count| Chunk { path, offset, first, count, header_checksum: 99 + offset };
    let version = Version { generation: 42, chunks: vec![chunk(0, 8192, 0, 2), chunk(1, 0, 2, 2)] };
    let extent =
        |name: &str, version| Some(ExtentRecord { name: name.to_string(), shape: shape.clone(), version });
    let path =
        |name: &str, memory| PathRecord { name: name.to_string(), memory, end: 1 << 20, written: 1 << 40 };
    Superblock {
        tier: 0x0011_2233_4455_6677_8899_AABB_CCDD_EEFF,
        sequence: 17,
        session: 0x0102_0304_0506_0708,
        step: Some(1000),
        path: 1,
        block_bytes: 4096,
        job: "a run".to_string(),
        host: "knoten-ä".to_string(),
        rank: 2,
        world: 8,
        generation: 43,
        payload: vec![0, 255, 1],
        paths: vec![path("/mnt/fast/a run/knoten-ä/rank-2", false), path("memory", true)],
        extents: vec![extent("written", Some(version)), None, extent("defined", None)],
    }
}

/// Stored bytes of a superblock that an open would accept.
fn stored_bytes(superblock: &Superblock) -> Vec<u8> {
    superblock.encode().unwrap().on_path(superblock.path)
}

#[test]
fn the_bytes_are_those_of_the_first_release() {
    let (bytes, sum) = header().encode();
    let stored = golden("tier-1-chunk.bin", &bytes);
    assert!(stored == bytes);
    assert_eq!(ChunkHeader::parse(&stored), Ok((header(), sum)));
    let stored = golden("tier-1-superblock.bin", &stored_bytes(&superblock()));
    assert!(stored == stored_bytes(&superblock()));
    assert_eq!(Superblock::parse(&stored), Ok(superblock()));
}

/// Independent parser, written from the table in `format`: checks the offset of each field.
#[test]
fn fields_lie_where_the_table_says_in_little_endian() {
    let stored = golden("tier-1-chunk.bin", &header().encode().0);
    let number = |at: usize, len: usize| {
        stored[at..at + len].iter().rev().fold(0_u128, |n, byte| n << 8 | u128::from(*byte))
    };
    assert_eq!(&stored[..8], b"SPWCHUNK");
    assert_eq!((number(8, 4), number(12, 4)), (1, 0x0102_0304));
    assert_eq!((number(16, 16), number(32, 8)), (header().tier, header().session.into()));
    assert_eq!((number(40, 4), number(44, 4), number(48, 8)), (3, 1, 42));
    assert_eq!((number(56, 4), number(60, 4), number(64, 8), number(72, 8)), (7, 3, 1 << 33, 1 << 20));
    assert_eq!((number(128, 8), number(136, 8), number(144, 8)), (u64::MAX.into(), 0, 0x1234_5678_9ABC_DEF0));
    assert_eq!((stored.len(), &stored[152..]), (4096, &[0; 4096 - 152][..]));
}

/// Reads fields one after another.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn number(&mut self, len: usize) -> u128 {
        let (field, rest) = self.0.split_at(len);
        self.0 = rest;
        field.iter().rev().fold(0, |n, byte| n << 8 | u128::from(*byte))
    }

    fn numbers<const N: usize>(&mut self, lens: [usize; N]) -> [u128; N] {
        lens.map(|len| self.number(len))
    }

    fn text(&mut self) -> Vec<u8> {
        let len = self.number(4) as usize;
        let (text, rest) = self.0.split_at(len);
        self.0 = rest;
        text.to_vec()
    }
}

/// The same for a superblock and its table.
#[test]
fn fields_of_a_superblock_lie_where_the_tables_say() {
    let stored = golden("tier-1-superblock.bin", &stored_bytes(&superblock()));
    let (head, table) = stored.split_at(4096);
    assert_eq!(&head[..8], b"SPWSUPER");
    let mut fields = Fields(&head[8..]);
    assert_eq!(fields.numbers([4, 4, 8]), [1, 0x0102_0304, 17]);
    let [len, checksum] = fields.numbers([8, 8]);
    assert_eq!(fields.numbers([16, 4, 4, 8]), [superblock().tier, 1, 0, superblock().session.into()]);
    assert_eq!(Fields(&head[248..]).number(8), checksum::of(&head[..248]).into());
    assert!(head[72..248].iter().chain(&head[256..]).all(|byte| *byte == 0));
    let (table, padding) = table.split_at(len as usize);
    assert_eq!(checksum, checksum::of(table).into());
    assert!(stored.len().is_multiple_of(4096) && padding.iter().all(|byte| *byte == 0));

    let mut fields = Fields(table);
    assert_eq!(fields.numbers([8, 8, 8]), [1, 1000, 4096]);
    assert_eq!((fields.text(), fields.text()), (b"a run".to_vec(), "knoten-ä".as_bytes().to_vec()));
    assert_eq!(fields.numbers([4, 4, 8]), [2, 8, 43]);
    assert_eq!((fields.text(), fields.number(4)), (vec![0, 255, 1], 2));
    for (name, memory) in [("/mnt/fast/a run/knoten-ä/rank-2", 0), ("memory", 1)] {
        assert_eq!(fields.text(), name.as_bytes());
        assert_eq!(fields.numbers([4, 8, 8]), [memory, 1 << 20, 1 << 40]);
    }
    assert_eq!(fields.numbers([4, 4]), [3, 2]);
    assert_eq!((fields.text(), fields.numbers([4, 8, 8, 8])), (b"written".to_vec(), [3, 10_000, 0, 4096]));
    assert_eq!(fields.numbers([8, 4]), [42, 2]);
    assert_eq!(fields.numbers([4, 8, 4, 4, 8]), [0, 8192, 0, 2, 99 + 8192]);
    assert_eq!(fields.numbers([4, 8, 4, 4, 8]), [1, 0, 2, 2, 99]);
    assert_eq!(fields.numbers([4, 4]), [0, 1]);
    assert_eq!((fields.text(), fields.numbers([4, 8, 8, 8])), (b"defined".to_vec(), [3, 10_000, 0, 4096]));
    assert!(fields.0.is_empty());
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 20
}

/// Overwrites some bytes with extreme values.
fn mutate(bytes: &mut Vec<u8>, state: &mut u64) {
    const WILD: [u64; 8] = [0, 1, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 32, u64::MAX, i64::MAX as u64];
    for _ in 0..1 + random(state) % 4 {
        let at = random(state) as usize % bytes.len();
        match random(state) % 4 {
            0 => bytes[at] ^= 1 << (random(state) % 8),
            1 => bytes[at] = random(state) as u8,
            2 => {
                let wild = WILD[random(state) as usize % WILD.len()].to_le_bytes();
                let room = (bytes.len() - at).min(8);
                bytes[at..at + room].copy_from_slice(&wild[..room]);
            }
            _ => bytes.truncate(at.max(1)),
        }
    }
}

#[test]
fn no_head_of_a_chunk_harms_and_none_but_the_right_one_passes() {
    const REASONS: [&str; 6] = [
        "it is too short",
        "are too few for a header of a chunk",
        "its first bytes are not those of a tier",
        "byte order",
        "format version",
        "its fields do not match its checksum",
    ];
    let (right, sum) = header().encode();
    let mut state = 1;
    for _ in 0..200_000 {
        let mut bytes = right.clone();
        mutate(&mut bytes, &mut state);
        match ChunkHeader::parse(&bytes) {
            Ok(found) => assert!(found == (header(), sum) && bytes[..152] == right[..bytes.len().min(152)]),
            Err(message) => assert!(REASONS.iter().any(|reason| message.contains(reason)), "{message}"),
        }
    }
    (0..right.len().min(600))
        .for_each(|len| assert!(ChunkHeader::parse(&right[..len]).is_err() || len >= 152));
}

/// Each single field identifies a header that belongs elsewhere, even if its checksum matches. If all fields match, the
/// checksum does.
#[test]
fn a_head_with_one_wrong_field_or_another_sum_belongs_to_another_chunk() {
    let shape = Arc::new(Shape::new(&[100 << 20], 1 << 20).unwrap());
    let right = header();
    let check = |header: &ChunkHeader, header_checksum: u64| {
        let ChunkHeader { path, offset, first, .. } = right;
        let chunk = Chunk { path, offset, first, count: 3, header_checksum };
        let ChunkHeader { extent, generation, .. } = right;
        let subject = Subject { extent, name: String::new(), shape: Arc::clone(&shape), generation };
        check_header(&header.encode().0, &chunk, &subject, right.tier)
    };
    let committed = right.encode().1;
    assert_eq!(check(&right, committed).as_ref(), Ok(&right));
    let fields: [fn(&mut ChunkHeader); 8] = [
        |header| header.tier ^= 1 << 100,
        |header| header.extent += 1,
        |header| header.path += 1,
        |header| header.generation -= 1,
        |header| header.first += 1,
        |header| header.offset += 4096,
        |header| header.block_bytes *= 2,
        |header| header.checksums.push(5),
    ];
    for (n, change) in fields.iter().enumerate() {
        let mut header = right.clone();
        change(&mut header);
        assert!(check(&header, header.encode().1).is_err(), "field {n}");
    }
    // Generation 42 of a run that crashed before its commit, at the same offset.
    for header in [
        ChunkHeader { session: 1, ..right.clone() },
        ChunkHeader { checksums: vec![u64::MAX, 1, 0x1234_5678_9ABC_DEF0], ..right.clone() },
    ] {
        let message = check(&header, committed).unwrap_err();
        assert!(message.contains("not the committed one"), "{message}");
    }
}

/// Mutated bytes with correct checksums, so that the table parser itself sees extreme values.
#[test]
fn no_superblock_harms_even_with_checksums_that_fit() {
    let right = stored_bytes(&superblock());
    let table = SuperblockHeader::parse(&right).unwrap().table_bytes as usize;
    let mut state = 2;
    let mut passed = 0;
    for round in 0..300_000 {
        let mut bytes = right.clone();
        if round % 3 == 0 {
            mutate(&mut bytes, &mut state);
            match Superblock::parse(&bytes) {
                Ok(found) => assert_eq!(found, superblock()),
                Err(message) => assert!(!message.is_empty()),
            }
            continue;
        }
        let mut wild = bytes[4096..4096 + table].to_vec();
        mutate(&mut wild, &mut state);
        bytes.truncate(4096);
        bytes[24..32].copy_from_slice(&(wild.len() as u64).to_le_bytes());
        bytes[32..40].copy_from_slice(&checksum::of(&wild).to_le_bytes());
        let sum = checksum::of(&bytes[..248]);
        bytes[248..256].copy_from_slice(&sum.to_le_bytes());
        bytes.extend_from_slice(&wild);
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        if let Ok(found) = Superblock::parse(&bytes) {
            passed += 1;
            assert_eq!(Superblock::parse(&stored_bytes(&found)).as_ref(), Ok(&found));
        }
    }
    assert!(passed > 1000, "{passed}: the checksums did not fit");
}

#[test]
fn another_version_or_byte_order_is_named() {
    let mut bytes = stored_bytes(&superblock());
    bytes[8] = 2;
    assert!(Superblock::parse(&bytes).unwrap_err().contains("format version is 2"));
    let mut bytes = stored_bytes(&superblock());
    bytes[12..16].reverse();
    assert!(Superblock::parse(&bytes).unwrap_err().contains("byte order"));
    assert!(Superblock::parse(b"PK\x03\x04 something else, long enough").is_err());
    assert!(Superblock::parse(&[]).is_err());
}

#[test]
fn a_superblock_that_no_open_would_take_has_no_bytes() {
    let changed = |change: fn(&mut Superblock)| {
        let mut superblock = superblock();
        change(&mut superblock);
        superblock.encode().map(|_| ())
    };
    assert_eq!(changed(|_| {}), Ok(()));
    let no_blocks = |one: &mut Superblock| {
        let version = one.extents[0].as_mut().and_then(|extent| extent.version.as_mut());
        version.unwrap().chunks.clear();
    };
    assert!(changed(no_blocks).is_err());
    assert!(changed(|one| one.paths = vec![one.paths[0].clone(); MAX_PATHS + 1]).is_err());
    assert!(changed(|one| one.paths[0].end = 4096).is_err(), "a part outside its file");
    assert!(changed(|one| one.block_bytes = 100).is_err());
}
