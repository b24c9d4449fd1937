//! Proves that an installed copy serves C users. The examples are built against it with pkg-config as C, as C++ and
//! statically, and with CMake where it is installed. Each example runs and checks its own result.

mod support;

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use support::{cmake, empty_dir, install, release_build, release_library, root, succeed};

const TIMEOUT: Duration = Duration::from_secs(120);

/// A prefix with an installed copy, created once.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = empty_dir("install").join("prefix with space");
        install(release_library(), &prefix);
        prefix
    })
}

fn examples() -> Vec<PathBuf> {
    let folder = fs::read_dir(root().join("examples_c")).expect("examples_c exists");
    let mut sources: Vec<PathBuf> =
        folder.map(|entry| entry.expect("its entries can be read").path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "c"));
    assert!(!sources.is_empty(), "there are examples");
    sources
}

/// The output of pkg-config, for a shell: it quotes blanks in paths.
fn pkg_config(options: &str) -> String {
    let folder = prefix().join("lib/pkgconfig");
    succeed(Command::new("pkg-config").args(options.split(' ')).env("PKG_CONFIG_PATH", folder), TIMEOUT)
        .trim()
        .to_string()
}

fn build_and_run(name: &str, compiler: &str, flags: &str) {
    for source in examples() {
        let binary = empty_dir(&format!("example-{name}")).join("example");
        let line =
            format!("{compiler} -Wall -Wextra -Wpedantic -Werror -O1 {source:?} -o {binary:?} {flags} -lm");
        succeed(Command::new("sh").args(["-c", &line]), TIMEOUT);
        let dynamic = succeed(Command::new("readelf").arg("-d").arg(&binary), TIMEOUT);
        assert_eq!(dynamic.contains("[libspillway.so.2]"), !name.starts_with("static"), "{dynamic}");
        let said = succeed(Command::new(&binary).env("LD_LIBRARY_PATH", prefix().join("lib")), TIMEOUT);
        assert!(said.contains("learned"), "{said}");
    }
}

#[test]
fn the_example_builds_as_c_and_as_cpp_and_learns() {
    let flags = pkg_config("--cflags --libs spillway");
    for standard in ["c99", "c11", "c17"] {
        build_and_run(standard, &format!("gcc -std={standard}"), &flags);
    }
    for standard in ["c++11", "c++17", "c++20"] {
        build_and_run(standard, &format!("g++ -std={standard} -x c++"), &flags);
    }
}

#[test]
fn the_example_links_statically() {
    let flags = pkg_config("--static --cflags --libs spillway");
    let flags = flags.replace("-lspillway", "-l:libspillway.a");
    build_and_run("static", "gcc -std=c11", &flags);
    build_and_run(
        "static-cpp",
        "g++ -std=c++17 -x c++",
        &flags.replace("-l:libspillway.a", "-x none -l:libspillway.a"),
    );
}

#[test]
fn cmake_finds_the_package() {
    let folder = empty_dir("cmake");
    let source = examples().remove(0);
    let list = format!(
        "project(example C)\nfind_package(spillway {} REQUIRED CONFIG)\n\
         foreach(kind spillway static)\n  add_executable(with_${{kind}} {source:?})\n  \
         target_link_libraries(with_${{kind}} PRIVATE spillway::${{kind}} m)\nendforeach()\n",
        env!("CARGO_PKG_VERSION")
    );
    let build = folder.join("build");
    succeed(&mut cmake(&folder, prefix(), &list), TIMEOUT);
    succeed(Command::new("cmake").arg("--build").arg(&build), TIMEOUT);
    for kind in ["with_spillway", "with_static"] {
        assert!(succeed(&mut Command::new(build.join(kind)), TIMEOUT).contains("learned"));
    }
    // Below 1.0, each minor version may have another ABI.
    for other in ["99.0", "0.0"] {
        let other_folder = folder.join(other);
        fs::create_dir(&other_folder).expect("the target directory is writable");
        let list = format!("project(other C)\nfind_package(spillway {other} REQUIRED CONFIG)\n");
        let mut refused = cmake(&other_folder, prefix(), &list);
        assert_ne!(support::run(&mut refused, TIMEOUT).code, Some(0), "version {other} was found");
    }
}

#[test]
fn destdir_changes_where_files_are_written_and_not_what_they_say() {
    let stage = empty_dir("stage");
    let mut script = Command::new("sh");
    script.arg(root().join("packaging/install.sh")).arg("/opt/spillway").arg(release_library());
    script.arg(release_library().with_file_name("libspillway_preload.so"));
    // Any program stands for the tool, which is of another crate.
    let tool = Path::new("/bin/true");
    script.arg(tool);
    succeed(script.env("DESTDIR", &stage), TIMEOUT);
    let lib = stage.join("opt/spillway/lib");
    let pc = fs::read_to_string(lib.join("pkgconfig/spillway.pc")).expect("spillway.pc is installed");
    assert!(pc.starts_with("prefix=/opt/spillway\n") && !pc.contains(&*stage.to_string_lossy()), "{pc}");
    assert!(!pc.contains('@'), "{pc}");
    let link = |name: &str| fs::read_link(lib.join(name)).expect("a link").to_string_lossy().into_owned();
    assert_eq!(link("libspillway.so"), "libspillway.so.2");
    assert_eq!(link("libspillway.so.2"), concat!("libspillway.so.", env!("CARGO_PKG_VERSION")));
    let dynamic = succeed(Command::new("readelf").arg("-d").arg(lib.join("libspillway.so")), TIMEOUT);
    assert!(dynamic.contains("soname: [libspillway.so.2]"), "{dynamic}");
    let preload = succeed(Command::new("nm").arg("-D").arg(lib.join("libspillway_preload.so")), TIMEOUT);
    assert!(preload.contains(" T io_submit"), "{preload}");
    assert!(pc.contains("\npreload=${libdir}/libspillway_preload.so\n"), "{pc}");
    assert!(pc.contains("\nabi=2\ndeclarations=${includedir}/spillway/abi.json\n"), "{pc}");
    assert!(stage.join("opt/spillway/include/spillway/abi.json").exists());
    let installed = fs::read(stage.join("opt/spillway/bin/spillway")).expect("the tool is installed");
    assert_eq!(installed, fs::read(tool).expect("every system has it"));
    assert!(stage.join("opt/spillway/include/spillway.hpp").exists());
    assert!(stage.join("opt/spillway/include/spillway.h").exists() && lib.join("libspillway.a").exists());
}

#[test]
fn libraries_go_where_a_distribution_has_them() {
    let prefix = empty_dir("libdir");
    let mut script = Command::new("sh");
    script.arg(root().join("packaging/install.sh")).arg(&prefix).arg(release_library());
    succeed(script.env_remove("DESTDIR").env("LIBDIR", "lib/some-machine"), TIMEOUT);
    let lib = prefix.join("lib/some-machine");
    assert!(lib.join("libspillway.so.2").exists() && !prefix.join("lib/libspillway.so").exists());
    let mut asked = Command::new("pkg-config");
    asked.args(["--libs", "spillway"]).env("PKG_CONFIG_PATH", lib.join("pkgconfig"));
    let flags = succeed(&mut asked, TIMEOUT);
    assert!(flags.contains(&format!("-L{}", lib.display())), "{flags}");
    let config =
        fs::read_to_string(lib.join("cmake/spillway/spillway-config.cmake")).expect("it is installed");
    assert!(config.contains("/../../include") && !config.contains('@'), "{config}");
}

/// The other runners use the build of these tests. They start cargo without the variables that it sets for a test, and
/// the parent of this process has none of these.
#[test]
fn a_build_outside_of_a_test_has_nothing_to_compile() {
    release_library();
    let parent = format!("/proc/{}/environ", std::os::unix::process::parent_id());
    let parent = fs::read(&parent).unwrap_or_else(|error| panic!("{parent}: {error}"));
    let variables = parent.split(|byte| *byte == 0).filter_map(|line| {
        let end = line.iter().position(|byte| *byte == b'=')?;
        Some((OsString::from_vec(line[..end].to_vec()), OsString::from_vec(line[end + 1..].to_vec())))
    });
    let mut cargo = Command::new(env!("CARGO"));
    cargo.env_clear().envs(variables).current_dir(root()).args(release_build()).arg("--message-format=json");
    let messages = succeed(&mut cargo, TIMEOUT);
    let stale: Vec<&str> = messages.lines().filter(|line| line.contains("\"fresh\":false")).collect();
    assert!(messages.contains("\"fresh\":true") && stale.is_empty(), "{stale:#?}");
}

/// What `cargo cinstall` reads: the same headers as `make install`, and a library version whose first number is in the
/// SONAME.
#[test]
fn metadata_of_cargo_c_gives_the_same_headers_and_the_same_soname() {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).current_dir(root());
    let packages: serde_json::Value =
        serde_json::from_str(&succeed(&mut cargo, TIMEOUT)).expect("it is JSON");
    let packages = packages["packages"].as_array().expect("a list");
    let package = packages.iter().find(|package| package["name"] == "spillway").expect("it is listed");
    assert!(package["features"]["capi"].is_array(), "cargo-c asks for this feature");
    let capi = &package["metadata"]["capi"];
    assert_eq!(capi["library"]["version"], "2.0.0", "libspillway.so.2");
    assert_eq!(
        (&capi["header"]["generation"], &capi["header"]["subdirectory"]),
        (&false.into(), &false.into())
    );
    assert_eq!(
        capi["install"]["include"]["asset"],
        serde_json::json!([{ "from": "include/**/*", "to": "" }])
    );
    let files = |folder: &Path| {
        let listed = succeed(Command::new("find").args([".", "-type", "f"]).current_dir(folder), TIMEOUT);
        listed.lines().map(str::to_string).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(files(&root().join("include")), files(&prefix().join("include")));
}

#[test]
fn a_wrong_call_of_the_installer_says_what_is_wrong() {
    let script = root().join("packaging/install.sh");
    for (arguments, words) in [
        (vec!["/opt/spillway"], "usage"),
        (vec!["relative", "libspillway.so"], "absolute"),
        (vec!["/opt/spillway", "nowhere/libspillway.so"], "does not exist"),
    ] {
        let finished = support::run(Command::new("sh").arg(&script).args(arguments), TIMEOUT);
        assert!(finished.code != Some(0) && finished.stderr.contains(words), "{finished:?}");
    }
}

#[test]
fn the_program_in_the_header_builds_as_c99_and_cpp17_and_learns() {
    let header = fs::read_to_string(root().join("include/spillway.h")).expect("the header exists");
    let code: Vec<&str> = header.lines().filter_map(|line| line.strip_prefix("//     ")).collect();
    let start =
        code.iter().position(|line| line.starts_with("#include")).expect("the program has an include");
    let end = code.iter().position(|line| *line == "}").expect("the program ends");
    let folder = empty_dir("program of the header");
    let (source, binary) = (folder.join("program.c"), folder.join("program"));
    fs::write(&source, code[start..=end].join("\n") + "\n").expect("the target directory is writable");
    let flags = pkg_config("--cflags --libs spillway");
    for compiler in ["gcc -std=c99", "g++ -std=c++17 -x c++"] {
        let line = format!("{compiler} -Wall -Wextra -Wpedantic -Werror {source:?} -o {binary:?} {flags}");
        succeed(Command::new("sh").args(["-c", &line]), TIMEOUT);
        let said = succeed(Command::new(&binary).env("LD_LIBRARY_PATH", prefix().join("lib")), TIMEOUT);
        assert_eq!(said, "weight[0] = 1.00\n", "{compiler}");
    }
}

#[test]
fn the_header_names_an_example_that_exists() {
    let header = fs::read_to_string(root().join("include/spillway.h")).expect("the header exists");
    let named: Vec<&str> = header
        .split(|c: char| c.is_whitespace() || "():,".contains(c))
        .map(|word| word.trim_end_matches('.'))
        .filter(|word| word.starts_with("examples_c/"))
        .collect();
    assert!(!named.is_empty(), "the header names an example");
    assert!(named.iter().all(|file| root().join(file).exists()), "{named:?}");
}
