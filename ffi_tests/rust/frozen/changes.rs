//! Changes of a copy of the headers: those that a frozen interface forbids, with the rules that refuse them, and those
//! that it allows.

use std::fs;
use std::path::{Path, PathBuf};

use crate::face::headers;

/// A change of one header.
pub struct Change {
    /// The effect of the change, which is also the name of its test.
    pub name: &'static str,
    header: &'static str,
    /// Each text is replaced once, in order.
    edits: &'static [(&'static str, &'static str)],
    /// Rules that refuse the change. Empty: the change is allowed.
    pub refused_by: &'static [&'static str],
    /// True if abidiff reports it.
    pub reported: bool,
}

const fn change(
    name: &'static str,
    header: &'static str,
    edits: &'static [(&'static str, &'static str)],
    refused_by: &'static [&'static str],
    reported: bool,
) -> Change {
    Change { name, header, edits, refused_by, reported }
}

pub const CHANGES: [Change; 15] = [
    change(
        "removed_function",
        "base.h",
        &[("enum spw_status spw_get_threads(uint32_t *count_out);", "")],
        &["exports", "types"],
        true,
    ),
    change(
        "other_parameter_type",
        "base.h",
        &[("spw_get_threads(uint32_t *count_out)", "spw_get_threads(uint64_t *count_out)")],
        &["types"],
        true,
    ),
    change(
        "parameter_more",
        "base.h",
        &[("spw_get_threads(uint32_t *count_out)", "spw_get_threads(uint32_t *count_out, int32_t more)")],
        &["types"],
        true,
    ),
    change(
        "other_result_type",
        "base.h",
        &[("uint32_t spw_abi_version(void)", "uint64_t spw_abi_version(void)")],
        &["types"],
        true,
    ),
    // The compiler refuses this change; abidiff considers it harmless.
    change(
        "handle_no_longer_const",
        "io.h",
        &[("spw_io_get_stats(const struct spw_io *io", "spw_io_get_stats(struct spw_io *io")],
        &["types"],
        false,
    ),
    change(
        "other_callback",
        "base.h",
        &[("(*spw_log_fn)(void *user, int32_t level", "(*spw_log_fn)(void *user, int64_t level")],
        &["types"],
        true,
    ),
    change(
        "moved_field",
        "optim.h",
        &[("    double sum_squares;", "    uint64_t extra;\n    double sum_squares;")],
        &["layout"],
        true,
    ),
    change(
        "exchanged_fields",
        "base.h",
        &[
            ("uint64_t adam_calls;", "uint64_t exchanged;"),
            ("uint64_t lion_calls;", "uint64_t adam_calls;"),
            ("uint64_t exchanged;", "uint64_t lion_calls;"),
        ],
        &["layout"],
        true,
    ),
    change("removed_field", "optim.h", &[("    double sum_squares;", "")], &["layout", "types"], true),
    change("other_field_type", "optim.h", &[("    double lr;", "    uint64_t lr;")], &["types"], true),
    change(
        "renumbered_value",
        "base.h",
        &[("SPW_ERR_NO_SPACE = 21", "SPW_ERR_NO_SPACE = 29")],
        &["enums"],
        true,
    ),
    change("removed_value", "base.h", &[("    SPW_ERR_NO_SPACE = 21,", "")], &["enums"], true),
    change(
        "allowed_function",
        "base.h",
        &[("const char *spw_version(void);", "const char *spw_version(void);\nint32_t spw_new(void);")],
        &[],
        false,
    ),
    change("allowed_field", "base.h", &[("} spw_stats;", "    uint64_t extra;\n} spw_stats;")], &[], false),
    change(
        "allowed_value",
        "base.h",
        &[("SPW_ERR_NO_SPACE = 21,", "SPW_ERR_NO_SPACE = 21,\n    SPW_ERR_NEW = 29,")],
        &[],
        false,
    ),
];

impl Change {
    /// Copies the headers of `include` below `work`, and changes the copy.
    pub fn apply(&self, include: &Path, work: &Path) -> PathBuf {
        let copy = work.join("include");
        fs::create_dir_all(copy.join("spillway")).expect("the target directory is writable");
        let place = |from: &Path, to: &Path| fs::copy(from, to).expect("the target directory is writable");
        place(&include.join("spillway.h"), &copy.join("spillway.h"));
        for header in headers(include) {
            place(&header, &copy.join("spillway").join(header.file_name().expect("a file has a name")));
        }
        let path = copy.join("spillway").join(self.header);
        let mut text = fs::read_to_string(&path).expect("headers are text");
        for (from, to) in self.edits {
            assert!(text.contains(from), "{} has no `{from}`", self.header);
            text = text.replacen(from, to, 1);
        }
        fs::write(path, text).expect("the target directory is writable");
        copy
    }
}
