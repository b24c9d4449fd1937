//! Finds circular imports between the files of a crate.

use std::collections::{BTreeMap, BTreeSet};

/// A module, as the names on the path from the crate's root. The root itself is the empty list.
type Module = Vec<String>;

/// The names that a module passes on with `pub use`, and the modules that they come from.
type PassedOn = BTreeMap<Module, BTreeMap<String, Module>>;

/// The circles among `files`, each given as its path under the crate's `src` and its text. Each circle lists its
/// modules, joined by commas. A folder's own file that only lists and passes on what is in the folder is in no circle;
/// one with code of its own is a file like others.
pub fn circles(files: &[(String, String)]) -> Vec<String> {
    let sources: BTreeMap<Module, Source> =
        files.iter().map(|(path, text)| (module(path), Source::of(text))).collect();
    let passed = sources.iter().map(|(own, source)| (own.clone(), source.passed_on(own, &sources)));
    let passed: PassedOn = passed.collect();
    let imports: BTreeMap<&Module, BTreeSet<Module>> =
        sources.iter().map(|(own, source)| (own, source.imported(own, &sources, &passed))).collect();
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        sources.keys().map(|from| (from, reachable(from, &imports))).collect();
    let circle = |one: &Module| -> Vec<String> {
        let both = reached[one].iter().filter(|other| reached[*other].contains(one));
        both.map(|other| other.join("::")).collect()
    };
    let found: BTreeSet<String> = sources.keys().map(|one| circle(one).join(", ")).collect();
    found.into_iter().filter(|names| names.contains(", ")).collect()
}

/// One file.
struct Source {
    /// The text without comments, tests, and what is passed on.
    text: String,
    /// The paths of its imports, those passed on excepted.
    imports: Vec<String>,
    /// The paths that it passes on.
    passed_on: Vec<String>,
}

impl Source {
    fn of(text: &str) -> Source {
        let (mut own, mut imports, mut passed_on) = (String::new(), Vec::new(), Vec::new());
        for statement in without_tests(text).split(';') {
            let tree = statement
                .rsplit_once("use ")
                .filter(|(before, _)| before.is_empty() || before.ends_with([' ', '}', ')']));
            match tree {
                Some((before, tree))
                    if before.trim_end().ends_with("pub") || before.trim_end().ends_with(')') =>
                {
                    own.push_str(before);
                    expand("", tree.trim(), &mut passed_on);
                }
                found => {
                    if let Some((_, tree)) = found {
                        expand("", tree.trim(), &mut imports);
                    }
                    own.push_str(statement);
                }
            }
            own.push(';');
        }
        Source { text: own, imports, passed_on }
    }

    fn passed_on(&self, own: &Module, files: &BTreeMap<Module, Source>) -> BTreeMap<String, Module> {
        let none = PassedOn::new();
        let named = self.passed_on.iter().filter_map(|path| {
            Some((path.rsplit("::").next()?.to_string(), target(own, path, files, &none)?))
        });
        named.collect()
    }

    fn imported(
        &self,
        own: &Module,
        files: &BTreeMap<Module, Source>,
        passed: &PassedOn,
    ) -> BTreeSet<Module> {
        let mut paths = self.imports.clone();
        let children = files.keys().filter(|file| file.len() == own.len() + 1 && file.starts_with(own));
        let children = children.filter_map(|file| Some(format!("{}::", file.last()?)));
        for start in ["crate::".to_string(), "super::".to_string()].into_iter().chain(children) {
            let places = self.text.match_indices(&start).filter(|(at, _)| {
                let before = &self.text[..*at];
                // `pub(in path)` names no import.
                !before.ends_with("in ")
                    && !before.ends_with(|last: char| last.is_alphanumeric() || "_:".contains(last))
            });
            paths.extend(places.map(|(at, _)| path_at(&self.text[at..])));
        }
        let mut targets: BTreeSet<Module> =
            paths.iter().filter_map(|path| target(own, path, files, passed)).collect();
        let words: BTreeSet<&str> = self.text.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        let used = passed[own].iter().filter(|(name, _)| words.contains(name.as_str()));
        targets.extend(used.map(|(_, target)| target.clone()));
        targets.remove(own);
        targets
    }
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
    let text = text.split("\nmod tests {").next().unwrap_or(text);
    text.lines().map(|line| line.split("//").next().unwrap_or(line)).collect::<Vec<_>>().join(" ")
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

/// The file that a path refers to: its longest prefix that is a file, or the file whose name that one passes on.
fn target(own: &Module, path: &str, files: &BTreeMap<Module, Source>, passed: &PassedOn) -> Option<Module> {
    let mut names: Vec<&str> = path.split("::").filter(|name| !name.is_empty()).collect();
    let child = |name: &str| [&own[..], &[name.to_string()]].concat();
    let mut base = match *names.first()? {
        "crate" => Module::new(),
        "self" => own.clone(),
        "super" => own[..own.len().checked_sub(1)?].to_vec(),
        name if files.contains_key(&child(name)) => child(name),
        _ => return None,
    };
    names.remove(0);
    while names.first() == Some(&"super") {
        base.pop()?;
        names.remove(0);
    }
    let prefix = |length: usize| -> Module {
        base.iter().cloned().chain(names[..length].iter().map(|name| String::from(*name))).collect()
    };
    let length = (0..=names.len()).rev().find(|length| files.contains_key(&prefix(*length)))?;
    let file = prefix(length);
    let passed = names.get(length).and_then(|name| passed.get(&file)?.get(*name));
    // The crate's root only lists modules.
    passed.cloned().or_else(|| (!file.is_empty()).then_some(file))
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
