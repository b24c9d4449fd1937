//! The models and machines of the papers.
//!
//! The papers give layers and hidden size; the parameters are 12 * layers * hidden^2, as in ZeRO-Infinity (Deep
//! Optimizer States Table 2 names that source). So a preset has no embeddings, and its vocabulary is 0 where the paper
//! names no tokenizer.
#![forbid(unsafe_code)]

use super::config::Model;
use super::machine::{Machine, PathSpec};

const GB: f64 = 1e9;
const LLAMA_2_TOKENS: u64 = 32_000;

/// A paper's models: its prefix, its table, its vocabulary, and (size, layers, hidden size) of each.
type Table = (&'static str, &'static str, u64, &'static [(&'static str, u64, u64)]);

const TABLES: [Table; 3] = [
    (
        "superoffload",
        "SuperOffload Table 4",
        0,
        &[
            ("1b", 20, 2048),
            ("2b", 40, 2048),
            ("3b", 60, 2048),
            ("4b", 64, 2304),
            ("5b", 44, 3072),
            ("6b", 53, 3072),
            ("8b", 72, 3072),
            ("10b", 50, 4096),
            ("11b", 55, 4096),
            ("12b", 60, 4096),
            ("13b", 65, 4096),
            ("15b", 78, 4096),
            ("20b", 25, 8192),
            ("25b", 30, 8192),
            ("50b", 60, 8192),
            ("60b", 75, 8192),
            ("70b", 87, 8192),
            ("80b", 100, 8192),
            ("150b", 45, 16384),
            ("200b", 60, 16384),
        ],
    ),
    (
        "dos",
        "Deep Optimizer States Table 2",
        LLAMA_2_TOKENS,
        &[("7b", 32, 4096), ("8.3b", 72, 3072), ("10b", 50, 4096), ("13b", 40, 5120), ("20b", 48, 6144)],
    ),
    (
        "mlp-offload",
        "MLP-Offload Table 2",
        LLAMA_2_TOKENS,
        &[
            ("40b", 128, 5120),
            ("52b", 64, 8192),
            ("70b", 80, 8192),
            ("100b", 124, 8192),
            ("120b", 96, 10240),
            ("130b", 70, 12288),
            ("280b", 72, 16384),
        ],
    ),
];

/// Names of all models, as [`model`] takes them: those of each table.
pub fn model_names() -> impl Iterator<Item = Vec<String>> {
    let of =
        |(prefix, _, _, rows): &Table| rows.iter().map(|(size, ..)| format!("{prefix}-{size}")).collect();
    TABLES.iter().map(of)
}

/// The model of a paper, such as `mlp-offload-40b`.
pub fn model(name: &str) -> Option<Model> {
    let (size, (prefix, source, vocabulary, rows)) =
        TABLES.iter().find_map(|table| Some((name.strip_prefix(table.0)?.strip_prefix('-')?, table)))?;
    let (_, layers, hidden) = rows.iter().find(|(own, ..)| *own == size)?;
    let layer = 12 * hidden * hidden;
    Some(Model {
        name: format!("{prefix}-{size}"),
        family: source.to_string(),
        parameters: layers * layer,
        active_parameters: layers * layer,
        layers: *layers,
        hidden: *hidden,
        vocabulary: *vocabulary,
        largest_module: layer,
    })
}

/// A machine of a paper.
pub struct Preset {
    /// As the option takes it.
    pub name: &'static str,
    /// Where the paper describes it.
    pub source: &'static str,
    /// GPUs of the machine.
    pub gpus: u64,
    /// Fields that the paper does not state.
    pub assumed: &'static [&'static str],
    /// The machine without its paths.
    machine: Machine,
    /// Name, read and write in GB/s, and capacity in bytes of each path.
    paths: &'static [(&'static str, f64, f64, u64)],
}

/// Speeds that the papers do not state are those of the H100 machine of Deep Optimizer States.
fn h100() -> Machine {
    Machine {
        gpu_memory: 80_000_000_000,
        host_memory: 512_000_000_000,
        h2d: 55.0 * GB,
        d2h: 55.0 * GB,
        duplex: true,
        cpu: 8.0 * GB,
        downscale: f64::INFINITY,
        gpu: 25.0 * GB,
        flops: 400e12,
        paths: Vec::new(),
    }
}

/// All machines.
pub fn machines() -> [Preset; 5] {
    [
        Preset {
            name: "gh200",
            source: "SuperOffload section 5.1, Table 1, Table 3, Fig. 6",
            gpus: 1,
            assumed: &["gpu"],
            machine: Machine {
                gpu_memory: 96_000_000_000,
                host_memory: 480_000_000_000,
                h2d: 450.0 * GB,
                d2h: 450.0 * GB,
                // 8 billion parameters in 0.608 s.
                cpu: 13.2 * GB,
                flops: 990e12,
                ..h100()
            },
            paths: &[],
        },
        Preset {
            name: "dos-h100",
            source: "Deep Optimizer States sections 1 and 5.1, Table 1",
            gpus: 4,
            assumed: &["flops"],
            // Rounding at 62 GB/s of f32 on each GPU's share of the host.
            machine: Machine { downscale: 62.0 * GB, ..h100() },
            paths: &[],
        },
        Preset {
            name: "dos-v100",
            source: "Deep Optimizer States section 5.4",
            gpus: 4,
            assumed: &["flops"],
            machine: Machine {
                gpu_memory: 32_000_000_000,
                host_memory: 192_000_000_000,
                h2d: 12.0 * GB,
                d2h: 12.0 * GB,
                downscale: 34.8 * GB,
                gpu: 35.0 * GB,
                flops: 60e12,
                ..h100()
            },
            paths: &[],
        },
        Preset {
            name: "mlp-offload-1",
            source: "MLP-Offload Table 1 and section 4.2",
            gpus: 4,
            assumed: &["flops"],
            machine: Machine { gpu: 10.0 * GB, ..h100() },
            paths: &[("nvme", 6.9, 5.3, 3_200_000_000_000), ("pfs", 3.6, 3.6, 1_000_000_000_000_000)],
        },
        Preset {
            name: "mlp-offload-2",
            source: "MLP-Offload Table 1 and section 4.1",
            gpus: 4,
            assumed: &["cpu", "gpu", "flops"],
            machine: Machine {
                gpu_memory: 40_000_000_000,
                h2d: 25.0 * GB,
                d2h: 25.0 * GB,
                cpu: 2.7 * GB,
                gpu: 10.0 * GB,
                flops: 150e12,
                ..h100()
            },
            paths: &[("nvme", 13.5, 4.8, 3_200_000_000_000), ("pfs", 6.9, 13.7, 100_000_000_000_000_000)],
        },
    ]
}

impl Preset {
    /// The machine with its paths.
    pub fn machine(&self) -> Machine {
        let path = |(name, read, write, capacity): &(&str, f64, f64, u64)| PathSpec {
            name: name.to_string(),
            read: read * GB,
            write: write * GB,
            capacity: *capacity,
        };
        Machine { paths: self.paths.iter().map(path).collect(), ..self.machine.clone() }
    }
}

/// The machine of a paper.
pub fn machine(name: &str) -> Option<Preset> {
    machines().into_iter().find(|preset| preset.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = (1_u64 << 30) as f64;

    fn parameters(name: &str) -> f64 {
        model(name).unwrap().parameters as f64
    }

    #[test]
    fn sizes_are_those_of_the_names_where_the_papers_tables_agree_with_them() {
        // The layers and widths that the papers print give other sizes for these: the relative error.
        let off = [("mlp-offload-70b", -0.080), ("mlp-offload-280b", -0.172), ("dos-20b", 0.087)];
        for name in model_names().flatten() {
            let size: f64 = name.rsplit('-').next().unwrap().trim_end_matches('b').parse().unwrap();
            let error = parameters(&name) / (size * GB) - 1.0;
            match off.iter().find(|(odd, _)| *odd == name) {
                Some((_, expected)) => assert!((error - expected).abs() < 0.001, "{name}: {error}"),
                // The 7 B model's embeddings are not in the formula: 6.4 B.
                None => assert!(error.abs() < 0.085, "{name}: {error}"),
            }
        }
    }

    /// "FP16 model size" and "FP32 optimizer" of Deep Optimizer States Table 2 are 4 and 16 bytes per parameter in GiB,
    /// rounded down or up. The row of 20 B does not follow from the 48 layers that are printed.
    #[test]
    fn the_memory_table_of_deep_optimizer_states() {
        for (name, half, full) in
            [("7b", 24.0, 96.0), ("8.3b", 30.0, 121.0), ("10b", 37.0, 150.0), ("13b", 46.0, 188.0)]
        {
            let parameters = parameters(&format!("dos-{name}"));
            assert!((4.0 * parameters / GIB - half).abs() < 1.0, "{name}: {}", 4.0 * parameters / GIB);
            assert!((16.0 * parameters / GIB - full).abs() < 1.0, "{name}: {}", 16.0 * parameters / GIB);
        }
        let printed = 16.0 * parameters("dos-20b") / GIB;
        assert!((printed / 294.0 - 1.103).abs() < 0.001, "{printed}");
        // 44 layers, as GPT-NeoX has, are one percent off.
        assert!((printed * 44.0 / 48.0 / 294.0 - 1.010).abs() < 0.001);
    }

    #[test]
    fn names_are_found_and_others_are_not() {
        assert!(model("mlp-offload-41b").is_none() && model("dos").is_none() && model("").is_none());
        for preset in machines() {
            assert!(preset.machine().check().is_ok() && machine(preset.name).is_some());
        }
        assert!(machine("dgx").is_none());
    }
}
