//! The rules of a frozen interface. Each rule returns its faults, one line per fault.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::TIMEOUT;
use crate::face::{Declaration, Face};
use crate::support::{run, succeed};

/// Every frozen function is exported.
pub fn exports(frozen: &Face, present: &Face) -> Vec<String> {
    frozen.exports.difference(&present.exports).map(|name| format!("{name} is no longer exported")).collect()
}

/// Every frozen field keeps its offset. A struct grows only at its end, and only if it begins with `struct_size`.
pub fn layout(frozen: &Face, present: &Face) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, was) in &frozen.layout {
        match present.layout.get(name) {
            None => faults.push(format!("{name} is gone")),
            Some(is) if name.contains('.') && is != was => {
                faults.push(format!("{name}: offset and size were {was:?}, now {is:?}"));
            }
            Some(is) if is[0] < was[0] => faults.push(format!("{name} shrank from {} to {}", was[0], is[0])),
            Some(is) if is[0] > was[0] && !frozen.layout.contains_key(&format!("{name}.struct_size")) => {
                faults.push(format!("{name} grew, and has no struct_size"));
            }
            Some(_) => {}
        }
    }
    for (name, is) in present.layout.iter().filter(|(name, _)| !frozen.layout.contains_key(*name)) {
        let size = name.split_once('.').and_then(|(owner, _)| frozen.layout.get(owner));
        if size.is_some_and(|size| is[0] < size[0]) {
            faults.push(format!("{name} was added inside the frozen part of its struct"));
        }
    }
    faults
}

/// A program that was compiled with the frozen headers passes their struct sizes. `smallest` has the smallest `struct_size`
/// that the library accepts for each struct.
pub fn smallest_sizes(frozen: &Face, smallest: &BTreeMap<String, u64>) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, size) in frozen.layout.iter().filter(|(name, _)| !name.contains('.')) {
        match smallest.get(name) {
            Some(least) if *least <= size[0] => {}
            least => faults.push(format!("{name} has {} bytes, the library accepts from {least:?}", size[0])),
        }
    }
    faults
}

/// Every frozen enum value keeps its number.
pub fn enums(frozen: &Face, present: &Face) -> Vec<String> {
    let fault = |(name, was): (&String, &u64)| match present.enums.get(name) {
        None => Some(format!("{name} is gone")),
        Some(is) if is != was => Some(format!("{name} was {was}, now {is}")),
        Some(_) => None,
    };
    frozen.enums.iter().filter_map(fault).collect()
}

/// Functions, callbacks and fields have the types of the frozen headers, as the C compiler compares types. Names of
/// types have the meaning that the present headers give them.
pub fn types(frozen: &Face, present: &Face, work: &Path) -> Vec<String> {
    let mut code = "#include <spillway.h>\n".to_string();
    let mut same = |what: &str, is: String, was: &str| {
        code.push_str(&format!(
            "_Static_assert(__builtin_types_compatible_p({is}, {was}), \"{what}: {was}\");\n"
        ));
    };
    for declaration in &frozen.declarations {
        match declaration {
            Declaration::Function { name, kind, .. } => same(name, format!("__typeof__({name})"), kind),
            Declaration::Callback { name, kind } => same(name, name.clone(), kind),
            Declaration::Opaque { name } => same(name, format!("{name} *"), &format!("struct {name} *")),
            Declaration::Struct { name, fields } => {
                for (kind, field) in fields {
                    same(&format!("{name}.{field}"), format!("__typeof__((({name} *)0)->{field})"), kind);
                }
            }
            Declaration::Enum { .. } => {}
        }
    }
    let source = work.join("types.c");
    fs::write(&source, code).expect("the target directory is writable");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-Werror", "-fsyntax-only", "-I"]).arg(&present.include).arg(&source);
    let finished = run(&mut gcc, TIMEOUT);
    match finished.code {
        Some(0) => Vec::new(),
        _ => finished.stderr.lines().filter(|line| line.contains("error:")).map(str::to_string).collect(),
    }
}

/// The report of abidiff about two shared objects with the functions and types of both interfaces.
pub fn abidiff(frozen: &Face, present: &Face, work: &Path) -> Vec<String> {
    let (old, new) = (stub(frozen, &work.join("frozen")), stub(present, &work.join("present")));
    let mut command = Command::new("abidiff");
    command.arg("--no-added-syms");
    // Structs that grew may have new fields at their end. abidiff reports less about the structs of this list.
    let grown = frozen.layout.keys().filter_map(|name| name.strip_suffix(".struct_size"));
    let size = |face: &Face, name: &str| face.layout.get(name).map_or(0, |numbers| numbers[0]);
    let grown: Vec<&str> = grown.filter(|name| size(present, name) > size(frozen, name)).collect();
    if !grown.is_empty() {
        let list = work.join("allowed.ini");
        let names = grown.join("|");
        let allowed = format!(
            "[suppress_type]\n type_kind = struct\n name_regexp = ^({names})$\n has_data_member_inserted_at = end\n"
        );
        fs::write(&list, allowed).expect("the target directory is writable");
        command.arg("--suppressions").arg(list);
    }
    command.arg(old).arg(new);
    let finished = run(&mut command, TIMEOUT);
    match finished.code {
        Some(0) => Vec::new(),
        code => vec![format!("abidiff: exit status {code:?}\n{}{}", finished.stdout, finished.stderr)],
    }
}

/// A shared object with debug information whose functions are empty. One extra function per type
/// makes the type reachable.
fn stub(face: &Face, work: &Path) -> PathBuf {
    fs::create_dir_all(work).expect("the target directory is writable");
    let mut code = "#include <spillway.h>\n".to_string();
    for declaration in &face.declarations {
        let text = match declaration {
            Declaration::Function { text, .. } => text.clone(),
            Declaration::Struct { name, .. } => format!("void type_{name}({name} *value)"),
            Declaration::Enum { name, .. } | Declaration::Callback { name, .. } => {
                format!("void type_{name}({name} value)")
            }
            Declaration::Opaque { .. } => continue,
        };
        code.push_str(&format!("{text} {{ __builtin_trap(); }}\n"));
    }
    let (source, library) = (work.join("stub.c"), work.join("libstub.so"));
    fs::write(&source, code).expect("the target directory is writable");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-g", "-shared", "-fPIC", "-Wl,-soname,libstub.so", "-I"]).arg(&face.include);
    gcc.arg(&source).arg("-o").arg(&library);
    succeed(&mut gcc, TIMEOUT);
    library
}
