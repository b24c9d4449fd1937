//! Finds circular imports between the files of a crate.

use std::collections::{BTreeMap, BTreeSet};

/// A module, as the names on the path from the crate's root. The root itself is the empty list.
type Module = Vec<String>;

/// The circles among `files`, each given as its path under the crate's `src` and its text. Each circle lists its
/// modules, joined by commas.
pub fn circles(files: &[(String, String)]) -> Vec<String> {
    let texts: BTreeMap<Module, String> =
        files.iter().map(|(path, text)| (module(path), without_tests(text))).collect();
    let imports: BTreeMap<&Module, BTreeSet<Module>> =
        texts.iter().map(|(own, text)| (own, imported(own, text, &texts))).collect();
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        texts.keys().map(|from| (from, reachable(from, &imports))).collect();
    let circle = |one: &Module| -> Vec<String> {
        let both = reached[one].iter().filter(|other| reached[*other].contains(one));
        both.map(|other| other.join("::")).collect()
    };
    let found: BTreeSet<String> = texts.keys().map(|one| circle(one).join(", ")).collect();
    found.into_iter().filter(|names| names.contains(", ")).collect()
}

fn module(path: &str) -> Module {
    let mut names: Module = path.trim_end_matches(".rs").split('/').map(String::from).collect();
    if matches!(names.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        names.pop();
    }
    names
}

/// The text without comments, and without the module of tests at its end.
fn without_tests(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    text.lines().map(|line| line.split("//").next().unwrap_or(line)).collect::<Vec<_>>().join(" ")
}

fn imported(own: &Module, text: &str, files: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let used = text.split(';').filter_map(|statement| {
        let (before, tree) = statement.rsplit_once("use ")?;
        before.ends_with([' ', '}']).then_some(tree).or_else(|| before.is_empty().then_some(tree))
    });
    let mut paths = Vec::new();
    used.for_each(|tree| expand("", tree.trim(), &mut paths));
    for start in ["crate::", "super::"] {
        paths.extend(text.match_indices(start).map(|(at, _)| path_at(&text[at..])));
    }
    let targets = paths.iter().filter_map(|path| target(own, path, files));
    targets.filter(|target| target != own).collect()
}

/// The path that a text begins with.
fn path_at(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || "_:".contains(*c)).collect()
}

/// The paths of a tree of imports.
fn expand(before: &str, tree: &str, paths: &mut Vec<String>) {
    let Some((first, rest)) = tree.split_once('{') else {
        return paths.push(format!("{before}{}", path_at(tree.trim())));
    };
    let before = format!("{before}{}", first.trim());
    let inside = rest.rsplit_once('}').map_or(rest, |(inside, _)| inside);
    let (mut depth, mut start) = (0, 0);
    for (at, character) in inside.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&before, inside[start..at].trim(), paths);
                start = at + 1;
            }
            _ => {}
        }
    }
    if !inside[start..].trim().is_empty() {
        expand(&before, inside[start..].trim(), paths);
    }
}

/// The file that a path refers to: its longest prefix that is a file.
fn target(own: &Module, path: &str, files: &BTreeMap<Module, String>) -> Option<Module> {
    let mut names: Vec<&str> = path.split("::").filter(|name| !name.is_empty()).collect();
    let mut base = match *names.first()? {
        "crate" => Module::new(),
        "self" => own.clone(),
        "super" => own[..own.len().checked_sub(1)?].to_vec(),
        _ => return None,
    };
    names.remove(0);
    while names.first() == Some(&"super") {
        base.pop()?;
        names.remove(0);
    }
    let longest = (0..=names.len()).rev().map(|len| {
        let more = names[..len].iter().map(|name| String::from(*name));
        base.iter().cloned().chain(more).collect::<Module>()
    });
    // The crate's root and a folder's own file only list the modules in them.
    longest.filter(|module| !module.is_empty()).find(|module| files.contains_key(module))
}

fn reachable(from: &Module, imports: &BTreeMap<&Module, BTreeSet<Module>>) -> BTreeSet<Module> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(one) = next.pop() {
        for target in &imports[&one] {
            if found.insert(target.clone()) {
                next.push(target.clone());
            }
        }
    }
    found
}
