//! The items of cbindgen's flat text: each with its name, its comment and its code.

/// A declaration with the comment before it.
pub struct Item {
    /// The name that it declares.
    pub name: String,
    /// Comment lines, without the `# Safety` section, which is for Rust.
    pub comment: Vec<String>,
    /// Lines of code.
    pub code: Vec<String>,
}

impl Item {
    /// Names that begin with `spw_` in the code.
    pub fn mentions(&self) -> impl Iterator<Item = &str> {
        let code = self.code.iter().filter(|line| !line.trim_start().starts_with("//"));
        let words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
        words.filter(|word| word.starts_with("spw_"))
    }

    /// Names in backquotes in the comments.
    pub fn documented(&self) -> impl Iterator<Item = &str> {
        let comments =
            self.comment.iter().chain(&self.code).filter(|line| line.trim_start().starts_with("//"));
        comments.flat_map(|line| line.split('`').skip(1).step_by(2))
    }

    /// True for an enum. Its values are passed as integers, so only comments name it.
    pub fn is_enum(&self) -> bool {
        self.code[0].starts_with("typedef enum")
    }

    /// True for a function.
    pub fn is_function(&self) -> bool {
        let first = &self.code[0];
        !first.starts_with("typedef") && !first.starts_with("#define") && first.contains('(')
    }

    /// True for the type of a function.
    pub fn is_callback(&self) -> bool {
        self.code[0].contains("(*")
    }

    /// True for a struct whose fields C does not see.
    pub fn is_handle(&self) -> bool {
        self.code[0].starts_with("typedef struct ") && self.code[0].ends_with(';')
    }

    /// The values of an enum, or the number that a macro defines, each with its name.
    pub fn numbers(&self) -> Vec<(&str, u64)> {
        let code = self.code.iter().map(|line| line.trim()).filter(|line| !line.starts_with("//"));
        let values = code.filter_map(|line| match self.is_enum() {
            true => line.trim_end_matches(',').split_once(" = "),
            false => line.strip_prefix("#define ")?.split_once(' '),
        });
        let number = |value: &str| match value {
            "UINT32_MAX" => Some(u64::from(u32::MAX)),
            "UINT64_MAX" => Some(u64::MAX),
            _ => value.parse().ok(),
        };
        values.filter_map(|(name, value)| Some((name, number(value)?))).collect()
    }

    /// The type and the name of each parameter of a function or a function type.
    pub fn parameters(&self) -> Vec<(String, String)> {
        let code: Vec<&str> = self.code.iter().map(|line| line.trim()).collect();
        let code = code.join(" ");
        let start = code.rfind('(').expect("a function has parameters");
        let inside = &code[start + 1..code.rfind(')').expect("it ends")];
        let split = |parameter: &str| {
            let at = parameter.rfind([' ', '*']).expect("a parameter has a name");
            (parameter[..=at].trim().to_string(), parameter[at + 1..].to_string())
        };
        inside.split(',').map(str::trim).filter(|parameter| *parameter != "void").map(split).collect()
    }

    /// The type of a function's result.
    pub fn result(&self) -> &str {
        let first = self.code[0].trim_start_matches("typedef ");
        let before = first.split('(').next().unwrap_or(first);
        before.trim_end_matches(|c: char| c.is_alphanumeric() || c == '_').trim()
    }

    /// The fields of a struct, each with its type. Empty for anything else.
    pub fn fields(&self) -> Vec<(&str, &str)> {
        if !self.code.first().is_some_and(|line| line.starts_with("typedef struct") && line.ends_with('{')) {
            return Vec::new();
        }
        let inside = self.code[1..self.code.len() - 1].iter().map(|line| line.trim());
        let fields = inside.filter(|line| !line.starts_with("//")).map(|line| line.trim_end_matches(';'));
        fields
            .filter_map(|line| line.rfind([' ', '*']).map(|at| (&line[at + 1..], line[..=at].trim())))
            .collect()
    }
}

/// Splits a text of cbindgen into its items, in order.
pub fn split(text: &str) -> Vec<Item> {
    let mut items = Vec::new();
    let (mut comment, mut code, mut depth) = (Vec::new(), Vec::<String>::new(), 0);
    for line in text.lines() {
        if code.is_empty() && line.starts_with("//") {
            comment.push(line.to_string());
            continue;
        }
        if code.is_empty() && line.trim().is_empty() {
            comment.clear();
            continue;
        }
        if !line.trim_start().starts_with("//") {
            depth += line.matches(['{', '(']).count();
            depth -= line.matches(['}', ')']).count();
        }
        code.push(line.to_string());
        if depth == 0 && (line.ends_with(';') || line.starts_with("#define")) {
            let (comment, code) = (std::mem::take(&mut comment), std::mem::take(&mut code));
            let code = with_typedef_names(&code);
            items.push(Item { name: name_of(&code), comment: without_safety(comment), code });
        }
    }
    assert!(code.is_empty(), "an item without an end: {code:?}");
    items
}

/// Code with `spw_x` for `enum spw_x` and `struct spw_x`, except where these are declared: tools that read the header take
/// the two for different types. The parameters of a function stay below each other.
fn with_typedef_names(code: &[String]) -> Vec<String> {
    let renamed = |line: &String| match line {
        _ if line.starts_with("typedef ") && !line.contains("(*") => line.clone(),
        _ if line.trim_start().starts_with("//") => line.clone(),
        _ => line.replace("enum spw_", "spw_").replace("struct spw_", "spw_"),
    };
    let begin = |line: &str| line.find('(').unwrap_or(0);
    let mut lines: Vec<String> = code.iter().map(renamed).collect();
    let shorter = " ".repeat(begin(&code[0]) - begin(&lines[0]));
    for line in &mut lines[1..] {
        *line = line.strip_prefix(&shorter).unwrap_or(line).to_string();
    }
    lines
}

/// The name that a declaration declares.
fn name_of(code: &[String]) -> String {
    let first = &code[0];
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    if let Some(rest) = first.strip_prefix("#define ") {
        return rest.split(' ').next().unwrap_or(rest).to_string();
    }
    if let Some((_, rest)) = first.split_once("(*") {
        return rest.chars().take_while(|c| is_name(*c)).collect();
    }
    if let Some(rest) = first.strip_prefix("typedef enum ").or_else(|| first.strip_prefix("typedef struct "))
    {
        return rest.chars().take_while(|c| is_name(*c)).collect();
    }
    let before = first.split('(').next().unwrap_or(first);
    before.rsplit([' ', '*']).next().unwrap_or(before).to_string()
}

fn without_safety(comment: Vec<String>) -> Vec<String> {
    let mut kept: Vec<String> = comment.into_iter().take_while(|line| line != "// # Safety").collect();
    while kept.last().is_some_and(|line| line == "//") {
        kept.pop();
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flat_text_becomes_items_with_names_and_without_safety_sections() {
        let text = "#define SPW_X 1\n\n// A struct.\ntypedef struct spw_a {\n    // 0\n    const uint32_t *b;\n} spw_a;\n\n\
                    typedef struct spw_o spw_o;\n\n// Calls.\ntypedef void (*spw_f)(void *user,\n    int x);\n\n\
                    // Does it.\n//\n// # Safety\n// None.\nenum spw_status spw_do(const struct spw_a *a,\n    \
                    struct spw_o *o);\n";
        let items = split(text);
        let names: Vec<&str> = items.iter().map(|item| item.name.as_str()).collect();
        assert_eq!(names, ["SPW_X", "spw_a", "spw_o", "spw_f", "spw_do"]);
        assert_eq!(items[1].fields(), [("b", "const uint32_t *")]);
        assert_eq!(items[4].comment, ["// Does it."]);
        assert_eq!(items[4].result(), "spw_status");
        let parameters = [("const spw_a *", "a"), ("spw_o *", "o")];
        assert_eq!(
            items[4].parameters(),
            parameters.map(|(kind, name)| (kind.to_string(), name.to_string()))
        );
        assert!(items[4].mentions().eq(["spw_status", "spw_do", "spw_a", "spw_o"]));
    }
}
