#!/bin/bash
# Runs the tests of the project. The last lines show one line per runner, the reasons of ignored tests, and the totals.
#
#   ffi_tests/all.sh            all runners
#   ffi_tests/all.sh rust py    only these runners
#
# The folder target/test-logs keeps the output of each runner, with its 20 slowest tests at the end. Exit
# status 0: nothing failed.
#
# Runners that wait for servers and disks most of the time work beside the Python tests. Their output is shown in their turn.
#
# Tests with many cases run a random sample of them. SPILLWAY_SEED, which the first and the last line show, repeats the samples;
# with SPILLWAY_TEST_LONG (`make test-long`) they run all cases.
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
logs=$root/target/test-logs
mkdir -p "$logs"
# A first build is faster without the files for incremental builds.
[ -d "${CARGO_TARGET_DIR:-target}/debug/incremental" ] || export CARGO_INCREMENTAL=0
passed=0 failed=0 ignored=0
summary="" broken=""
declare -A beside=()
declare -A groups=()
export SPILLWAY_SEED="${SPILLWAY_SEED:-$(date +%s)}"
cases="a sample of the cases, SPILLWAY_SEED=$SPILLWAY_SEED repeats it"
[ -z "${SPILLWAY_TEST_LONG:-}" ] || cases="all cases"
trap end_groups EXIT
trap 'exit 130' INT TERM

format() { cargo fmt --all --check && packaging/python_lint.sh; }
# Lints without object stores, which add 75 crates for one source file. `py` builds that file with warnings as errors.
lint() { cargo clippy --quiet --workspace --all-targets -- -D warnings; }
rust() {
    cargo test --workspace --no-fail-fast --config "target.'cfg(all())'.runner='$root/ffi_tests/timed.sh'" &&
        cargo test --release --package spillway-stores --features http # its crates are those of the release library
}
py() { packaging/python_tests.sh -v -o console_output_style=count --durations=20 --durations-min=1 -rs; }
pfs() { ffi_tests/pfs/run.sh gluster; }
docs() { make --silent docs; }
preload() {
    eval "$(packaging/python_env.sh --export)"
    SPILLWAY_DEEPSPEED_PYTHON=$SPILLWAY_PYTHON ffi_tests/preload/run.sh
}
arm() { ffi_tests/arm/run.sh; }

# Prints the numbers of tests that passed, failed and were ignored. Cargo prints one line per program, pytest and
# scripts one line.
counts() {
    awk '/^test result:/ || /^(=+ )?[0-9]+ (passed|failed|skipped|error)/ {
             for (i = 2; i <= NF; i++) {
                 if ($i ~ /^passed/) p += $(i - 1)
                 if ($i ~ /^(failed|error)/) f += $(i - 1)
                 if ($i ~ /^(ignored|skipped)/) n += $(i - 1)
             }
         }
         END { print p + 0, f + 0, n + 0 }' "$1"
}

# Prints the reasons of ignored tests, in the formats of libtest-mimic, pytest and the scripts.
reasons() {
    sed -nE 's/^test (.*[^ ]) +\.\.\. ignored(, | \()?(.*[^)])?\)?$/\1: \3/p; s/^SKIPPED \[[0-9]+\] //p; s/^ignored:? +//p' "$1"
}

# The slowest tests; pytest and the C programs print their own list.
slowest() {
    local times
    times=$(sed -nE 's/^test (.*) \.\.\. ok <([0-9.]+)s>$/\2 \1/p; s/^ok +(.*) \(([0-9]+) s\)$/\2 \1/p' "$1" | sort -rn | head -n 20)
    [ -z "$times" ] || printf 'slowest tests:\n%s\n' "$times"
}

# The rows of the tables of promises, and how many of them name their tests in the last column.
promises() {
    awk -F'|' '/^## What is not promised/ { exit }
        /^\|[-|]+$/ { rows--; tested -= named; next } # the row before it is the head
        /^\|/ { rows++; named = $(NF - 1) ~ /`/; tested += named }
        END { printf "docs/reference/promises-tests.md: %d of %d promises name their tests\n", tested, rows }' docs/reference/promises-tests.md
}

# Starts a runner whose output goes to its log alone.
start_beside() {
    echo "== $1 begins beside $2"
    in_background "$1" >"$logs/$1.log" 2>&1
    beside[$1]=$!
}

# Starts a function in a process group of its own, which ends with this script.
in_background() {
    set -m
    (
        began=$SECONDS
        "$@"
        status=$?
        echo $((SECONDS - began)) >"$logs/$1.seconds"
        exit $status
    ) </dev/null &
    set +m
    groups[$!]=1
}

end_groups() {
    local group
    for group in "${!groups[@]}"; do kill -TERM -- "-$group" 2>/dev/null; done
}

run() {
    local name=$1 log=$logs/$1.log start=$SECONDS status word p f n took
    begun=$((begun + 1))
    echo "== $name: runner $begun of $runners, $SECONDS s since the start"
    if [ -n "${beside[$name]:-}" ]; then
        wait "${beside[$name]}"
        status=$?
        unset "groups[${beside[$name]}]"
        cat "$log"
        took=$(cat "$logs/$name.seconds")
    else
        # All output goes to the log and to the screen.
        "$name" > >(tee "$log") 2>&1
        status=$?
        # The last background process is tee.
        wait $!
        took=$((SECONDS - start))
    fi
    slowest "$log" | tee -a "$log"
    read -r p f n < <(counts "$log")
    case $status in
        0) passed=$((passed + 1)) word=ok ;;
        77) ignored=$((ignored + 1)) word=ignored ;;
        *) failed=$((failed + 1)) word=FAILED broken+=" $name" ;;
    esac
    summary+=$(printf '%-8s %-8s %5s s  %5s passed %4s failed %4s ignored' "$name" "$word" "$took" "$p" "$f" "$n")$'\n'
    summary+=$(reasons "$log" | sed 's/^/             ignored: /')$'\n'
}

# What the later runners need is made while the first ones run: tools are installed, and libraries and DeepSpeed's ops are
# compiled with the lowest priority, on a processor that waits otherwise. Each runner makes the same calls again. They
# wait for a build in progress, find the finished work, and report errors.
set_up() {
    nice -n 19 cargo build --quiet --release --package spillway --package spillway-cli --package spillway-preload --package fakecuda --features spillway/s3 &
    for environment in python docs arm; do packaging/${environment}_env.sh; done
    (eval "$(packaging/python_env.sh --export)" &&
        DS_ACCELERATOR=cpu nice -n 19 "$SPILLWAY_PYTHON" ffi_tests/deepspeed/compiled_ops.py "$SPILLWAY_OLD_DEEPSPEED")
    wait
}
if [ $# = 0 ]; then
    in_background set_up >"$logs/set-up.log" 2>&1
    set -- format lint rust py pfs docs preload arm
fi
runners=$# begun=0
echo "== $cases"
while [ $# != 0 ]; do
    runner=$1
    shift
    if [ "$runner" = py ]; then
        for other; do
            case $other in pfs | docs | preload) start_beside "$other" py ;; esac
        done
    fi
    run "$runner"
done

for name in $broken; do printf '\n== the end of %s\n' "$logs/$name.log"; tail -n 30 "$logs/$name.log" | cut -c1-300; done
printf '\n%s' "$summary" | sed '/^$/d'
promises
echo "runners: $passed passed, $failed failed, $ignored ignored, $SECONDS s, $cases"
[ $failed = 0 ]
