"""The settings, statuses, commands and files in the docs agree with the code."""

import importlib.util
import pathlib
import re

import configuration
import pytest
from blocks import DOCS, ROOT, pages
from variables import VARIABLES

HEADERS = sorted([ROOT / "include" / "spillway.h", *(ROOT / "include" / "spillway").glob("*.h")])


def test_every_variable_that_the_code_reads_is_in_the_table():
    missing = {name: files for name, files in configuration.readers().items() if name not in {row[1] for row in VARIABLES}}
    assert not missing, f"describe them in docs/tools/variables.py: {missing}"


def test_every_variable_of_the_table_is_read():
    unread = {row[1] for row in VARIABLES} - set(configuration.readers())
    assert not unread, f"nothing reads {unread}; take them out of docs/tools/variables.py"


def test_a_variable_is_found_where_it_is_read(tmp_path):
    source = tmp_path / "a.rs"
    source.write_text('let a = std::env::var("SPILLWAY_NEW"); // std::env::var("SPILLWAY_OLD")\n')
    assert configuration._names(source) == ["SPILLWAY_NEW"]


def test_the_configuration_page_is_fresh():
    pytest.importorskip("pydantic")
    assert configuration.PAGE.read_text() == configuration.page(), "run python docs/tools/configuration.py"


def test_the_picture_of_the_readme_is_fresh():
    import iteration

    assert iteration.PICTURE.read_text() == iteration.picture(), "run python docs/tools/iteration.py"


def test_the_pictures_of_losses_are_fresh():
    import losses

    for path, of in losses.PICTURES.items():
        assert path.read_text() == losses.picture(*of), "run python docs/tools/losses.py"


def test_the_readme_has_at_most_700_words():
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_the_page_of_the_command_line_tool_is_fresh(tool):
    import cli

    assert cli.PAGE.read_text() == cli.page(tool), "run python docs/tools/cli.py target/release/spillway"


def test_every_status_has_cause_and_cure():
    text = "".join(path.read_text() for path in HEADERS)
    statuses = set(re.findall(r"^    (SPW_(?:OK|ERR_\w+)) = \d+,", text, re.M))
    rows = re.findall(r"^\| `(SPW_\w+)` \| (.+?) \| (.+?) \|$", (DOCS / "troubleshooting.md").read_text(), re.M)
    assert len(statuses) >= 36 and {name for name, _, _ in rows} == statuses
    assert len(rows) == len(statuses)


def _rows(text):
    """The cells of each row of the tables of a text, without heads and rules."""
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line.startswith("|")]
    rules = [number for number, row in enumerate(rows) if all(set(cell) <= {"-"} for cell in row)]
    return [row for number, row in enumerate(rows) if number not in rules and number + 1 not in rules]


def test_the_causes_of_foreign_have_a_cure_each_and_are_those_of_the_header():
    comment = (ROOT / "include" / "spillway" / "base.h").read_text().split("SPW_ERR_FOREIGN = ")[0].rpartition(" = ")[2]
    section = (DOCS / "troubleshooting.md").read_text().split("### Causes of SPW_ERR_FOREIGN\n")[1].split("\n#")[0]
    causes = [re.sub(r"\W+", " ", line.split("- ", 1)[1].split(":")[0]).split() for line in comment.splitlines() if "// - " in line]
    rows = _rows(section)
    assert len(causes) == len(rows) == 7 and all(len(row) == 3 and all(row) for row in rows)
    for cause, row in zip(causes, rows):
        assert set(cause[:3]) <= set(re.sub(r"\W+", " ", row[0]).split()), (cause, row[0])


def test_each_promise_names_a_test_that_exists():
    """Names without a folder are programs of ffi_tests/c; a row of a table of promises ends with its tests. Each subject of the page that
    states the promises has such tables."""
    text = (DOCS / "reference" / "promises-tests.md").read_text()
    page = (DOCS / "promises.md").read_text().split("## What is not promised")[0]
    subjects = re.findall(r"^## (.+)$", page, re.M)
    assert subjects and subjects == re.findall(r"^## (.+)$", text, re.M)
    rows = _rows(text)
    assert len(rows) > 60
    for row in rows:
        tests = re.findall(r"`([^`]+)`", row[-1])
        assert tests, row
        for name in tests:
            path = ROOT / name if "/" in name else ROOT / "ffi_tests" / "c" / name
            assert path.exists(), (name, row)


def test_the_first_page_of_the_site_shows_the_results_and_programs_of_the_readme():
    text, site = (ROOT / "README.md").read_text(), (DOCS / "index.md").read_text()
    for begin, end in (("<!-- result -->", "<!-- result ends -->"), ("<!-- programs -->", "<!-- programs end -->")):
        assert f":start-after: {begin}\n:end-before: {end}\n" in site and text.count(begin) == text.count(end) == 1
    programs = re.search(r"<!-- programs -->.*<!-- programs end -->", text, re.S)[0]
    assert re.findall(r"^```(\w+)$", programs, re.M) == ["python", "sh", "json", "c"]
    assert "| " not in site


def test_messages_that_people_search_for_are_headings_in_deepspeeds_words():
    package = importlib.util.find_spec("deepspeed")
    if package is None:
        pytest.skip("DeepSpeed, whose messages these are, is not installed")
    folder = pathlib.Path(package.submodule_search_locations[0]) / "ops"
    said = "".join((folder / name).read_text() for name in ("op_builder/builder.py", "op_builder/async_io.py"))
    headings = "\n".join(re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(), re.M))
    for words in (
        "Unable to JIT load the",
        "due to ninja not being installed",
        "does not match the version torch was compiled with",
        "requires the dev libaio .so object and headers but these were not found",
    ):
        assert words in headings and words in re.sub(r'"\s*f?"', "", said), words


def test_the_glossary_has_at_most_40_terms_in_order():
    text = (DOCS / "glossary.md").read_text().split("## Names in the source")[0]
    terms = re.findall(r"^\| (?!term |-)(.+?) \| (.+?) \|$", text, re.M)
    names = [name.lower() for name, _ in terms]
    assert 10 < len(names) <= 40 and names == sorted(names)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_of_the_repository_work(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    made = ("records/", "plots/", "c/")
    broken = [
        target
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", text)
        if not (page.parent / target).exists() and not target.startswith(made)
    ]
    assert not broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:src|kernels|ffi_tests|packaging|examples_c|include|docs)/[\w./-]+)`", page.read_text())
    optional = {"docs/_build/html"}
    missing = [name for name in named if not (ROOT / name).exists() and name not in optional]
    assert not missing


def test_names_of_c_functions_exist():
    """In hand-written pages, every `spw_` name is declared in a header."""
    text = "".join(path.read_text() for path in HEADERS)
    known = set(re.findall(r"\b(spw_\w+|SPW_\w+)\b", text))
    unknown = {}
    for page in pages():
        for name in re.findall(r"`((?:spw|SPW)_\w+)(?:\(\))?`", page.read_text()):
            if name not in known:
                unknown.setdefault(str(page.relative_to(ROOT)), []).append(name)
    assert not unknown


def _broken_tables(text):
    """The lines at which a blank line, or a row without the columns of its table, breaks a table."""
    lines = re.sub(r"^ *```.*?^ *```", lambda block: re.sub(r"[^\n]+", "x", block[0]), text, flags=re.M | re.S).splitlines()
    is_row = [line.lstrip().startswith("|") for line in lines]
    rule = [bool(re.fullmatch(r" *\|( *:?-+:? *\|)+", line)) for line in lines]
    columns = [len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for line in lines]
    broken = []
    for number in (number for number, row in enumerate(is_row) if row):
        begins = number == 0 or not is_row[number - 1]
        if begins and not (number + 1 < len(lines) and rule[number + 1]):
            broken.append(number + 1)
        elif not begins and columns[number] != columns[number - 1]:
            broken.append(number + 1)
    return broken


@pytest.mark.parametrize("page", [*pages(), ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page):
    assert not _broken_tables(page.read_text())


@pytest.mark.parametrize(
    "text, broken",
    [
        ("| a |\n|---|\n| b |\n", []),
        ("| a |\n|---|\n| b |\n\n| c |\n", [5]),
        ("| a | b |\n|---|---|\n| c |\n", [3]),
        ("| a |\n\n|---|\n", [1, 3]),
        ("```text\n| a |\n```\n", []),
        ("| `a|b` |\n|---|\n", []),
    ],
)
def test_a_broken_table_is_found(text, broken):
    assert _broken_tables(text) == broken
