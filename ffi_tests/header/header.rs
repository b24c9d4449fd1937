//! cbindgen generates the headers below include/spillway from src/capi, one header for each of its modules.
//!
//! cbindgen writes one flat text. Each item of it goes to the header of the module that declares it, in the order of
//! the module's files. `SPILLWAY_BLESS=1 cargo test -p spillway-header` writes the headers anew.

mod calls;
pub mod initializers;
pub mod items;
mod json;
mod python;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use calls::Calls;
use initializers::Structs;
use items::Item;

/// A module of src/capi, which becomes a header.
struct Module {
    name: String,
    /// The `//!` text of the module.
    doc: Vec<String>,
    files: Vec<PathBuf>,
    /// The names that its files declare, in their order.
    declared: Vec<String>,
}

impl Module {
    fn is_experimental(&self) -> bool {
        self.doc.iter().any(|line| line.contains("EXPERIMENTAL"))
    }
}

/// What is generated from src/capi.
pub struct Generated {
    /// The headers, each with its file name and its text.
    pub headers: Vec<(String, String)>,
    /// The module for Python's ctypes.
    pub python: String,
    /// The same declarations as JSON.
    pub json: String,
}

/// Generates from src/capi. `version` and `structs` are those of the library.
pub fn generate(root: &Path, version: &str, structs: &Structs) -> Generated {
    let copy = tempfile::tempdir().expect("the temporary directory is writable");
    let calls = Calls::of(&read(&root.join("src/capi/optim/table.rs")));
    copy_without_macros(&root.join("src/capi"), copy.path(), &calls);
    let modules = modules(copy.path());
    let mut config = cbindgen::Config::from_root_or_default(root);
    // Also an enum that no signature mentions, because it is passed as an integer.
    config.export.include = modules.iter().flat_map(|module| module.declared.iter().cloned()).collect();
    let builder = cbindgen::Builder::new().with_config(config);
    let files = modules.iter().flat_map(|module| &module.files);
    let builder = files.fold(builder, cbindgen::Builder::with_src);
    let mut text = Vec::new();
    builder.generate().expect("cbindgen reads src/capi").write(&mut text);
    let text = String::from_utf8(text).expect("the header is text");
    let items = items::split(&text);
    for item in &items {
        let owners = modules.iter().filter(|module| module.declared.contains(&item.name)).count();
        assert_eq!(owners, 1, "{} is declared in {owners} modules", item.name);
    }
    let headers = modules
        .iter()
        .map(|module| (format!("{}.h", module.name), header(module, &modules, &items, version, structs)));
    let json = json::text(&modules, &items, version, structs);
    Generated { headers: headers.collect(), python: python::module(&items), json }
}

/// Copies the sources in the form that cbindgen reads. It expands no macro of Rust, so an item inside `c_struct!` or
/// `statuses!` stands alone in the copy. `In<T>` and `Out<T>` are the pointers that they hold.
fn copy_without_macros(from: &Path, to: &Path, calls: &Calls) {
    for entry in fs::read_dir(from).expect("src/capi can be read") {
        let path = entry.expect("its entries can be read").path();
        let target = to.join(path.file_name().expect("an entry has a name"));
        if path.is_dir() {
            fs::create_dir(&target).expect("the copy is writable");
            copy_without_macros(&path, &target, calls);
            continue;
        }
        let text: String =
            read(&path)
                .lines()
                .filter(|line| *line != "statuses! {")
                .map(|line| {
                    if line.starts_with("c_struct! {") { "#[repr(C)]\n".into() } else { format!("{line}\n") }
                })
                .collect();
        let text = calls.expand(&with_sizes(&text));
        // The item's own brace stays.
        let text = text.replace("\n}\n}\n", "\n}\n");
        fs::write(target, raw_pointers(&text)).expect("the copy is writable");
    }
}

/// The text with `struct_size`, which `c_struct!` adds, in each struct of the header with fields.
fn with_sizes(text: &str) -> String {
    let mut sized = String::new();
    for line in text.lines() {
        sized.push_str(&format!("{line}\n"));
        if let Some(name) = line.strip_prefix("pub struct spw_").and_then(|rest| rest.strip_suffix(" {")) {
            sized.push_str(&format!("    /// `sizeof(spw_{name})`\n    pub struct_size: u32,\n"));
        }
    }
    sized
}

/// The text with `*const T` for `In<T>`, and `*mut T` for `Out<T>`.
fn raw_pointers(text: &str) -> String {
    [(": In<", "*const "), (": Out<", "*mut ")].iter().fold(text.to_string(), |text, (wrapper, pointer)| {
        let mut parts = text.split(wrapper);
        let mut raw = parts.next().unwrap_or_default().to_string();
        for part in parts {
            let (inside, rest) = part.split_once('>').expect("a pointer's type has no type parameters");
            raw.push_str(&format!(": {pointer}{inside}{rest}"));
        }
        raw
    })
}

/// The public modules of src/capi, in the order of its list.
fn modules(capi: &Path) -> Vec<Module> {
    let module = |name: String| {
        let folder = capi.join(&name);
        let own = if folder.is_dir() { folder.join("mod.rs") } else { capi.join(format!("{name}.rs")) };
        let text = read(&own);
        let mut files: Vec<PathBuf> =
            public_modules(&text).into_iter().map(|file| folder.join(format!("{file}.rs"))).collect();
        files.insert(0, own);
        let declared = files.iter().flat_map(|file| declared(&read(file))).collect();
        let doc = text.lines().map_while(|line| line.strip_prefix("//!")).map(str::to_string).collect();
        Module { name, doc, files, declared }
    };
    let mut modules: Vec<Module> =
        public_modules(&read(&capi.join("mod.rs"))).into_iter().map(module).collect();
    calls_beside_those_of_adam(&mut modules);
    modules
}

/// Moves each call of an optimizer that is declared beside its options to the module that has Adam's call, behind it.
fn calls_beside_those_of_adam(modules: &mut [Module]) {
    let home = modules.iter().position(|module| module.name == "optim").expect("there are optimizers");
    for optimizer in optimizers(&modules[home].declared).into_iter().rev() {
        for name in modules[home].declared.clone().into_iter().rev() {
            let of_adam = name.replace(&optimizer, "adam");
            let has = |module: &Module| module.name != "optim" && module.declared.contains(&of_adam);
            let Some(other) = modules.iter().position(has).filter(|_| of_adam != name) else { continue };
            modules[home].declared.retain(|known| *known != name);
            let at = modules[other].declared.iter().position(|known| *known == of_adam).expect("it has it");
            modules[other].declared.insert(at + 1, name);
        }
    }
}

/// The names of the optimizers among these items, by their steps.
fn optimizers(declared: &[String]) -> Vec<String> {
    let name = |item: &String| Some(item.strip_prefix("spw_")?.strip_suffix("_step")?.to_string());
    declared.iter().filter_map(name).collect()
}

/// A macro that repeats another one for each optimizer, for code that has the same calls of all.
fn macro_of_optimizers(names: &[String]) -> String {
    let uses: Vec<String> = names.iter().map(|name| format!("X({name}, {})", name.to_uppercase())).collect();
    format!(
        "// Each optimizer of this header, for code that has the same for all.\n#define SPW_OPTIMIZERS(X) {}\n\n",
        uses.join(" ")
    )
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn public_modules(text: &str) -> Vec<String> {
    let names = text.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    names.map(str::to_string).collect()
}

/// The names of the C items that a file declares.
fn declared(text: &str) -> Vec<String> {
    const KINDS: [&str; 6] = [
        "pub const ",
        "pub enum ",
        "pub struct ",
        "pub type ",
        "pub extern \"C\" fn ",
        "pub unsafe extern \"C\" fn ",
    ];
    let name = |line: &str| {
        let rest = KINDS.iter().find_map(|kind| line.strip_prefix(kind))?;
        Some(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>())
    };
    text.lines().filter_map(name).collect()
}

fn header(module: &Module, all: &[Module], items: &[Item], version: &str, structs: &Structs) -> String {
    let find = |name: &String| items.iter().find(|item| item.name == *name);
    let own: Vec<&Item> = module.declared.iter().filter_map(find).collect();
    let mut used: BTreeSet<&str> = own.iter().flat_map(|item| item.mentions()).collect();
    let is_enum = |name: &&str| items.iter().any(|item| item.name == **name && item.is_enum());
    used.extend(own.iter().flat_map(|item| item.documented()).filter(is_enum));
    let guard = format!("SPILLWAY_{}_H", module.name.to_uppercase());
    let mut text = format!("// spillway/{}.h\n//\n", module.name);
    module.doc.iter().for_each(|line| text.push_str(&format!("//{line}\n")));
    text.push_str(
        "//\n// C99 or C++11, or newer. Generated by cbindgen from src/capi. Edit the comments there.\n\n",
    );
    text.push_str(&format!("#ifndef {guard}\n#define {guard}\n\n"));
    if module.is_experimental() {
        let refusal = "may change with any release: define SPW_EXPERIMENTAL before the include";
        text.push_str("#ifndef SPW_EXPERIMENTAL\n");
        text.push_str(&format!("#error \"spillway/{}.h {refusal}\"\n#endif\n\n", module.name));
    }
    text.push_str("#include <stddef.h>\n#include <stdint.h>\n\n");
    let others = all.iter().filter(|other| other.name != module.name);
    let needed: Vec<&Module> =
        others.filter(|other| other.declared.iter().any(|name| used.contains(name.as_str()))).collect();
    needed.iter().for_each(|other| text.push_str(&format!("#include \"{}.h\"\n", other.name)));
    if !needed.is_empty() {
        text.push('\n');
    }
    if module.declared.iter().any(|name| name == "SPW_ABI_VERSION") {
        text.push_str(&format!("// Release version of this header.\n#define SPW_VERSION \"{version}\"\n\n"));
    }
    text.push_str("#ifdef __cplusplus\nextern \"C\" {\n#endif\n\n");
    for item in own {
        for line in item.comment.iter().chain(&item.code) {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        if let Some(initializer) = initializers::macro_of(item, structs) {
            text.push_str(&format!("\n{initializer}\n"));
        }
        text.push('\n');
    }
    if module.name == "optim" {
        text.push_str(&macro_of_optimizers(&optimizers(&module.declared)));
    }
    text.push_str("#ifdef __cplusplus\n} // extern \"C\"\n#endif\n\n");
    text.push_str(&format!("#endif // {guard}\n"));
    text
}
