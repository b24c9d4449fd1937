//! A C interface as data: its declarations, and the sizes, offsets and values that a C compiler gives them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::TIMEOUT;
use crate::support::succeed;

/// One declaration of a header. Types are written as in the header, without the name of the declared thing.
#[derive(Clone, Debug)]
pub enum Declaration {
    /// A struct with its fields, each a type and a name.
    Struct { name: String, fields: Vec<(String, String)> },
    /// An enum with the names of its values.
    Enum { name: String, values: Vec<String> },
    /// A struct without a body, which programs know by pointers only.
    Opaque { name: String },
    /// A type of functions that programs pass.
    Callback { name: String, kind: String },
    /// A function: its type, and its declaration without the semicolon.
    Function { name: String, kind: String, text: String },
}

/// A C interface. Keys of `layout` are `struct` (the value is the size) and `struct.field` (offset and size).
#[derive(Clone)]
pub struct Face {
    pub include: PathBuf,
    pub declarations: Vec<Declaration>,
    pub exports: BTreeSet<String>,
    pub layout: BTreeMap<String, Vec<u64>>,
    pub enums: BTreeMap<String, u64>,
}

impl Face {
    /// The interface that is stored in a frozen folder.
    pub fn stored(folder: &Path) -> Face {
        let lines = |name: &str| -> BTreeMap<String, Vec<u64>> {
            let text = fs::read_to_string(folder.join(name)).expect("the frozen folder has its lists");
            parse_lists(&text)
        };
        Face {
            include: folder.join("include"),
            declarations: declarations(&folder.join("include")),
            exports: lines("exports.txt").into_keys().collect(),
            layout: lines("layout.txt"),
            enums: lines("enums.txt").into_iter().map(|(name, numbers)| (name, numbers[0])).collect(),
        }
    }

    /// The interface that the headers of `include` declare; `work` is an empty folder for a compiled program. Every
    /// declared function counts as exported.
    pub fn declared(include: &Path, work: &Path) -> Face {
        let declarations = declarations(include);
        let mut lists = parse_lists(&described(include, &declarations, work));
        let enums: BTreeMap<String, u64> = declarations
            .iter()
            .filter_map(|declaration| match declaration {
                Declaration::Enum { name, values } => Some((name, values)),
                _ => None,
            })
            .flat_map(|(name, values)| values.iter().map(move |value| format!("{name}.{value}")))
            .map(|key| (key.clone(), lists.remove(&key).expect("it was printed")[0]))
            .collect();
        let exports = declarations.iter().filter_map(|declaration| match declaration {
            Declaration::Function { name, .. } => Some(name.clone()),
            _ => None,
        });
        Face {
            include: include.to_path_buf(),
            exports: exports.collect(),
            layout: lists,
            enums,
            declarations,
        }
    }
}

/// Reads lines of a name and numbers.
fn parse_lists(text: &str) -> BTreeMap<String, Vec<u64>> {
    let line = |line: &str| {
        let mut words = line.split(' ');
        let name = words.next().expect("a line has a first word").to_string();
        (name, words.map(|word| word.parse().expect("names are followed by numbers")).collect())
    };
    text.lines().map(line).collect()
}

/// The headers of an interface, without those that are marked experimental.
pub fn headers(include: &Path) -> Vec<PathBuf> {
    let folder = fs::read_dir(include.join("spillway")).expect("the headers exist");
    let mut paths: Vec<PathBuf> =
        folder.map(|entry| entry.expect("its entries can be read").path()).collect();
    paths.retain(|path| !fs::read_to_string(path).expect("headers are text").contains("EXPERIMENTAL"));
    paths.sort();
    paths
}

fn declarations(include: &Path) -> Vec<Declaration> {
    let texts = headers(include).into_iter().map(|path| fs::read_to_string(path).expect("headers are text"));
    texts.flat_map(|text| statements(&text)).map(|statement| declaration(&statement)).collect()
}

/// The statements of a header, with one blank between words. Comments, preprocessor lines and
/// C++-only parts are removed.
fn statements(text: &str) -> Vec<String> {
    let (mut code, mut in_macro, mut in_cpp) = (String::new(), false, false);
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or(line).trim();
        match line {
            "#ifdef __cplusplus" => in_cpp = true,
            "#endif" => in_cpp = false,
            _ if in_macro || line.starts_with('#') => in_macro = line.ends_with('\\'),
            _ if in_cpp => {}
            _ => code.extend([line, " "]),
        }
    }
    let (mut found, mut statement, mut depth) = (Vec::new(), String::new(), 0);
    for sign in code.chars() {
        depth += i32::from(sign == '{') - i32::from(sign == '}');
        if sign == ';' && depth == 0 {
            found.push(statement.split_whitespace().collect::<Vec<&str>>().join(" "));
            statement.clear();
        } else {
            statement.push(sign);
        }
    }
    assert!(statement.trim().is_empty(), "a header ends inside a statement: {statement}");
    found
}

fn declaration(statement: &str) -> Declaration {
    let body = || {
        let (head, rest) = statement.split_once('{').expect("it has a body");
        let name = head.split_whitespace().last().expect("a type has a name").to_string();
        (name, rest.split('}').next().expect("a body ends"))
    };
    if statement.starts_with("typedef enum ") {
        let (name, body) = body();
        let value = |value: &str| value.split_whitespace().next().map(str::to_string);
        return Declaration::Enum { name, values: body.split(',').filter_map(value).collect() };
    }
    if statement.starts_with("typedef struct ") {
        if !statement.contains('{') {
            return Declaration::Opaque { name: last_name(statement).1 };
        }
        let (name, body) = body();
        let fields = body.split(';').map(str::trim).filter(|field| !field.is_empty());
        return Declaration::Struct { name, fields: fields.map(last_name).collect() };
    }
    if let Some(rest) = statement.strip_prefix("typedef ") {
        let (result, rest) = rest.split_once("(*").expect("other types are functions");
        let (name, parameters) = rest.split_once(')').expect("the name ends");
        return Declaration::Callback { name: name.to_string(), kind: format!("{result}(*){parameters}") };
    }
    let (head, parameters) =
        statement.split_once('(').unwrap_or_else(|| panic!("no declaration: {statement}"));
    let (result, name) = last_name(head);
    let kind = format!("{result} ({parameters}");
    Declaration::Function { name, kind, text: statement.to_string() }
}

/// Divides `const char *path` into its type and its name.
fn last_name(text: &str) -> (String, String) {
    let start = text.rfind([' ', '*']).expect("a declaration has a type") + 1;
    (text[..start].trim().to_string(), text[start..].to_string())
}

/// A C program that prints every size, offset and value that the compiler gives.
fn described(include: &Path, declarations: &[Declaration], work: &Path) -> String {
    let mut lines = String::new();
    for declaration in declarations {
        match declaration {
            Declaration::Struct { name, fields } => {
                lines.push_str(&format!("printf(\"{name} %zu\\n\", sizeof({name}));\n"));
                for (_, field) in fields {
                    let offset = format!("offsetof({name}, {field})");
                    let size = format!("sizeof((({name} *)0)->{field})");
                    lines.push_str(&format!("printf(\"{name}.{field} %zu %zu\\n\", {offset}, {size});\n"));
                }
            }
            Declaration::Enum { name, values } => {
                for value in values {
                    lines.push_str(&format!(
                        "printf(\"{name}.{value} %llu\\n\", (unsigned long long){value});\n"
                    ));
                }
            }
            _ => {}
        }
    }
    let source = work.join("describe.c");
    let binary = work.join("describe");
    let head = "#include <spillway.h>\n#include <stddef.h>\n#include <stdio.h>\n";
    fs::write(&source, format!("{head}int main(void) {{\n{lines}return 0;\n}}\n"))
        .expect("the target directory is writable");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-Werror", "-I"]).arg(include).arg(&source).arg("-o").arg(&binary);
    succeed(&mut gcc, TIMEOUT);
    succeed(&mut Command::new(binary), TIMEOUT)
}
