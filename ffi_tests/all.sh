#!/bin/bash
# The tests of the project; one line per runner at the end. Exit 0 only if none failed.
#
#   ffi_tests/all.sh            all runners
#   ffi_tests/all.sh rust py    those named
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
logs=$root/target/test-logs
mkdir -p "$logs"
# What a first build would keep for the next one takes it longer than it saves there.
[ -d "${CARGO_TARGET_DIR:-target}/debug/incremental" ] || export CARGO_INCREMENTAL=0
passed=0 failed=0 skipped=0
summary=""

format() { cargo fmt --all --check; }
# Without object stores, whose 75 crates would be checked for one file; `py` builds it, with every warning an error.
lint() { cargo clippy --quiet --workspace --all-targets -- -D warnings; }
rust() { cargo test --workspace --no-fail-fast; }
py() { packaging/python_tests.sh; }
preload() {
    eval "$(packaging/python_env.sh --export)"
    SPILLWAY_DEEPSPEED_PYTHON=$SPILLWAY_PYTHON ffi_tests/preload/run.sh
}
arm() { ffi_tests/arm/run.sh; }

# One line with the counts of a runner: cargo's, one per test program, added up; else the last line with a count.
closing_line() {
    awk '/^test result:/ {
             for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p += $(i - 1); if ($i ~ /^failed/) f += $(i - 1) }
             programs++
         }
         /[0-9]+ (passed|failed|skipped)/ { last = $0 }
         END { if (programs) printf "%d passed, %d failed in %d test programs\n", p, f, programs; else print last }' "$1"
}

run() {
    local name=$1 log=$logs/$1.log start=$SECONDS status
    echo "== $name"
    # The log is the proof; the screen sees it as it comes.
    "$name" > >(tee "$log") 2>&1
    status=$?
    # The last that went into the background is tee.
    wait $!
    local took=$((SECONDS - start))
    case $status in
        0) passed=$((passed + 1)) word=ok ;;
        77) skipped=$((skipped + 1)) word=skipped ;;
        *) failed=$((failed + 1)) word=FAILED ;;
    esac
    summary+=$(printf '%-8s %-8s %4ss  %s' "$name" "$word" "$took" "$(closing_line "$log")")$'\n'
}

# What has to be fetched once comes in the meantime. Who needs it asks for it again, waits for the lock, and says what is wrong.
set_up() {
    for environment in python arm; do packaging/${environment}_env.sh; done
}
if [ $# = 0 ]; then
    set_up >"$logs/set-up.log" 2>&1 &
    set -- format lint rust py preload arm
fi
for runner; do run "$runner"; done

printf '\n%s' "$summary"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
