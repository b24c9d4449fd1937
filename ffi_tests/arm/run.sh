#!/bin/sh
# Tests the Arm library under qemu on an x86_64 machine: bits, bounds, choice of kernel, callers, instruction counts.
#
# `make test` runs a random sample of the processors, cases and faults of the checkers, and the unit tests that depend on
# the processor. SPILLWAY_SEED repeats a sample; SPILLWAY_TEST_LONG runs all.
#
# The first run installs the tool chain (packaging/arm_env.sh); exit status 77 means that root must install packages.
# The last line of the output names the folder with the output of each failed part.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
settings=$("$root/packaging/arm_env.sh" --export) || exit $?
tools=$("$root/packaging/arm_env.sh")
target=${CARGO_TARGET_DIR:-$root/target}
work=$target/arm
library=$target/aarch64-unknown-linux-gnu/release
passed=0
failed=0
ignored=0
tab=$(printf '\t')

export RUST_BACKTRACE=0 SPILLWAY_SEED="${SPILLWAY_SEED:-$(date +%s)}" SPILLWAY_TEST_LONG="${SPILLWAY_TEST_LONG:-}"

# The emulated processors, and the kernels that are checked on each. NEON and scalar do not depend on the SVE vector
# length. The two SVE kernels differ in how they round to bf16, and take turns on long vectors. The length of 48 bytes
# divides neither a cache line nor the lanes of a sum.
sve='sve_bf16, sve'
cpus="max,sve-default-vector-length=16:$sve, neon, scalar
max,sve-default-vector-length=32:$sve
max,sve-default-vector-length=48:$sve
max,sve-default-vector-length=64:sve_bf16
max,sve-default-vector-length=128:sve
max,sve-default-vector-length=256:sve_bf16
a64fx:sve
neoverse-n1:neon
max,sve=off:neon"

main() {
    mkdir -p "$work"
    cd "$root"
    check 'the library and its tests build for Arm' build
    check 'the library of this machine builds' host_library
    check 'the packages for Arm are made' packages
    if [ $failed = 0 ]; then
        choice_of_kernel
        golden_vectors
        longer_checks >"$work/checks"
        two_at_a_time
        ignore 'C program ffi_tests/c/lengths.c' 'steps 2^33 elements, hours of emulation; a kernel sees 2^16 at a time'
        count 'C program ffi_tests/c/lengths.c'
    fi
    echo "$passed passed, $failed failed, $ignored ignored (output in $work)"
    [ $failed = 0 ]
}

# check NAME COMMAND...: runs the command and prints one line with its result.
check() {
    perform "$@"
    count "$1"
}

# Writes the command's output to the log of NAME, and its status to a file beside the log.
perform() {
    name=$1 log=$(log_of "$1") began=$(date +%s)
    shift
    # Outside of a condition, because inside one the shell would continue after a failed command.
    set +e
    (set -e && "$@") </dev/null >"$log" 2>&1
    status=$?
    set -e
    echo $status >"$log.status"
    if [ $status = 0 ]; then
        echo "ok      $name ($(($(date +%s) - began)) s)${place:+ $place}"
    elif [ $status = 77 ]; then
        ignore "$name" "$(tail -n 1 "$log")"
    else
        echo "FAILED  $name ($(($(date +%s) - began)) s)"
        tail -n 15 "$log" | sed 's/^/        /'
    fi
}

# ignore NAME REASON
ignore() {
    echo "ignored $1: $2"
    echo 77 >"$(log_of "$1").status"
}

log_of() {
    printf '%s/%s.log' "$work" "$(printf '%s' "$1" | tr -c 'a-zA-Z0-9' _)"
}

count() {
    case $(cat "$(log_of "$1").status") in
        0) passed=$((passed + 1)) ;;
        77) ignored=$((ignored + 1)) ;;
        *) failed=$((failed + 1)) ;;
    esac
}

# Runs the checks of $work/checks, two at a time. Each line is one check; tabs separate its words.
two_at_a_time() {
    rm -rf "$work/taken" "$work"/*.status
    mkdir "$work/taken"
    lane &
    lane
    wait $!
    while IFS=$tab read -r name _; do count "$name"; done <"$work/checks"
}

# Takes the next line that the other process has not taken.
lane() {
    number=0 all=$(wc -l <"$work/checks")
    while IFS=$tab read -r name command a b c; do
        number=$((number + 1))
        mkdir "$work/taken/$number" 2>/dev/null || continue
        place="[$number of $all]"
        perform "$name" "$command" "$a" "$b" "$c"
    done <"$work/checks"
    place=
}

arm_cargo() {
    (eval "$settings" && cargo "$@")
}

arm() {
    cpu=$1
    shift
    (eval "$settings" && QEMU_CPU=$cpu exec timeout 900 "${qemu:-qemu-aarch64}" "$@")
}

build() {
    # Both libraries are built in one folder: they differ only in the last crate. The probe library needs no
    # optimisation, because its test only causes a panic.
    arm_cargo rustc --release --lib --package spillway --features probe -- -C opt-level=0
    mkdir -p "$work/probe"
    cp "$library/libspillway.so" "$work/probe/libspillway.so.2"
    ln -sf libspillway.so.2 "$work/probe/libspillway.so"
    arm_cargo build --release --lib --package spillway --package spillway-preload
    kernel_tests
    tests_of spillway library --lib
    aarch64-linux-gnu-gcc -std=c11 -O1 -static -Wall -Wextra -Werror -Iinclude ffi_tests/arm/one_step.c \
        "$library/libspillway.a" -lm -o "$work/one_step"
    cc -std=gnu11 -O2 -shared -fPIC -Wall -Wextra -Werror ffi_tests/arm/icount.c -o "$work/icount.so"
}

# The same build as for the Python tests.
host_library() {
    cargo build --release --lib --package spillway --package spillway-preload --package fakecuda --features spillway/s3
}

# The same packages as `make dist` builds.
packages() {
    rm -rf "$work/dist"
    eval "$("$root/packaging/python_env.sh" --export)"
    # Without the command line tool and object stores, because no test here runs them.
    SPILLWAY_WHEEL_WITHOUT_TOOL=1 PIP_NO_BUILD_ISOLATION=no PYTHON=$SPILLWAY_PYTHON \
        packaging/package.sh aarch64 "$library/libspillway.so" "$work/dist"
}

# tests_of PACKAGE NAME OPTION...: builds the tests of a package like a release, and writes
# their path to $work/NAME.tests.
tests_of() {
    package=$1 tests=$work/$2.tests
    shift 2
    rm -f "$tests"
    arm_cargo test --release --package "$package" --no-run "$@" >"$tests.txt" 2>&1 ||
        { cat "$tests.txt"; return 1; }
    sed -n 's/.*Executable .*(\(.*\))$/\1/p' "$tests.txt" >"$tests"
    [ -s "$tests" ]
}

# Checks that take more than a moment. The unit tests run two threads, so C programs that measure time
# wait until they end.
longer_checks() {
    listed "the library's unit tests" library_tests
    listed 'a C program builds against the unpacked archive and runs' archive
    printf '%s\n' "$cpus" | head -n 1 >"$work/cpus"
    printf '%s\n' "$cpus" | tail -n +2 | some 4 >>"$work/cpus"
    while IFS= read -r line; do
        listed "the checkers of the kernels on ${line%%:*}: ${line#*:}" checkers "$line"
    done <"$work/cpus"
    mutants
    listed 'every kernel and the host give the same digest through Python, in forked children too' digests
    listed 'the wheel installs into an Arm Python, and its optimizers come to the digest of the host' wheel
    listed "the preload library serves DeepSpeed's functions" preload_optimizers
    listed 'instructions per element are within the table' "$root/ffi_tests/arm/icount.sh"
    c_programs
}

# some NUMBER: this number of the lines, which the seed chooses; with SPILLWAY_TEST_LONG all of them.
some() {
    [ -z "$SPILLWAY_TEST_LONG" ] || set -- 1000
    awk -v seed="$SPILLWAY_SEED" 'BEGIN { srand(seed) } { printf "%f\t%s\n", rand(), $0 }' | sort -n | head -n "$1" | cut -f 2-
}

# listed NAME COMMAND...
listed() {
    (IFS=$tab && printf '%s\n' "$*")
}

# The checker prints how many cases it ran on which kernels. Fewer than 756 cases, or unexpected kernels, are a failure.
# Each processor has another sample of the cases.
checkers() {
    cpu=${1%%:*} kernels=${1#*:}
    SPILLWAY_SEED=$(printf '%s' "$SPILLWAY_SEED $cpu" | cksum | cut -d' ' -f1)
    SPILLWAY_TEST_EMULATOR=1 SPILLWAY_TEST_KERNELS=$kernels arm "$cpu" "$(cat "$work/kernels.tests")" --nocapture |
        cut -c1-300 >"$work/kernels.$cpu.txt"
    cat "$work/kernels.$cpu.txt"
    grep -q '^test result: ok' "$work/kernels.$cpu.txt"
    cases=$(sed -n "s/.*\b\([0-9][0-9]*\) cases on each of $kernels\$/\1/p" "$work/kernels.$cpu.txt")
    [ "${cases:-0}" -ge 756 ]
}

# Tests that do not depend on the vector unit run on one processor: those of arithmetic, threads, shared memory and calls of the
# system. The rules of tiers, plans and schedules are the same on every processor: they run on x86-64, and here if
# SPILLWAY_TEST_LONG is set. Five groups of tests are skipped:
# - tests that reserve terabytes of address space, because qemu-user keeps a record of each page;
# - tests that use MADV_DONTFORK, which qemu-user ignores;
# - tests that bind threads and ask for the nodes of pages, because qemu-user lacks the calls;
# - tests that start themselves as another process, which the host cannot run;
# - slow tests of nothing specific to this processor: the PTX interpreter, crashes, hangs and errors of a simulated disk, every
#   order of the calls of two owners on it, every order of actions on the catalogue (one thread, no I/O), all 2^32 patterns of a
#   split in integers, and random placements.
library_tests() {
    set --
    [ -n "$SPILLWAY_TEST_LONG" ] ||
        set -- arena:: capi:: checksum:: io:: offload::speculate:: offload::stage:: optim:: pool:: sys:: tier::tests::real
    for skipped in far_more_than_the_machine_has real_processes_exclude gpu::tests::bits interleave::tests::cuda a_crash_at_any \
        is_not_there_in_a_forked_child sys::binding::tests sys::page_nodes::tests sys::node_memory::tests \
        sys::lock::tests in_flight::a_forked_child in_flight::a_tier_ \
        hang::every_operation tier::tests::crash tier::tests::before swap::tests::split all_patterns_come_back \
        owners::in_every_order placement::tests::whatever_the_paths catalog::tests::every_order \
        beside::every_crash_point faults::an_error_on_the_nth_request faults::with_one_path_every_error; do
        set -- "$@" --skip "$skipped"
    done
    SPILLWAY_TEST_EMULATOR=1 arm max "$(cat "$work/library.tests")" "$@"
}

choice_of_kernel() {
    while read -r cpu wanted ran other; do
        check "$wanted runs when forced on $cpu" runs "$wanted" "$wanted" "$cpu" "$ran" "$other"
    done <<END
max sve_bf16 spillway_adam_sve_bf16 neon
max sve spillway_adam_sve spillway_adam_sve_bf16
max neon neon spillway_adam_sve
max scalar scalar neon
a64fx sve spillway_adam_sve spillway_adam_sve_bf16
neoverse-n1 neon neon spillway_adam_sve
END
    check 'sve_bf16 is the choice of max' runs '' sve_bf16 max spillway_adam_sve_bf16 neon
    check 'sve is the choice of a64fx' runs '' sve a64fx spillway_adam_sve spillway_adam_sve_bf16
    check 'neon is the choice of neoverse-n1' runs '' neon neoverse-n1 neon spillway_adam_sve
    check 'sve is refused on neoverse-n1' refused sve neoverse-n1
    check 'sve_bf16 is refused on a64fx' refused sve_bf16 a64fx
}

# runs FORCED NAME CPU THIS OTHER: the library reports kernel NAME, executes functions called THIS
# and none called OTHER.
runs() {
    [ -z "$1" ] || export SPILLWAY_KERNEL="$1"
    [ "$(executed "$3" "$4")" != 0 ]
    [ "$(cat "$work/name")" = "$2" ]
    [ "$(executed "$3" "$5")" = 0 ]
}

executed() {
    arm "$1" -plugin "$work/icount.so,in=$2,out=$work/count" "$work/one_step" f32 f32 bf16 bf16 decoupled step 4096 \
        >"$work/name"
    cut -d' ' -f1 "$work/count"
}

refused() {
    export SPILLWAY_KERNEL="$1"
    if arm "$2" "$work/one_step" f32 f32 f32 none none step 64 2>"$work/refused"; then return 1; fi
    cat "$work/refused"
    grep -q "this processor does not support $1" "$work/refused"
}

c_programs() {
    for source in examples_c/speculate ffi_tests/c/copies ffi_tests/c/undo examples_c/adam ffi_tests/c/threads; do
        listed "C program $source.c" c_program "$source.c"
    done
    for source in examples_c/*.c ffi_tests/c/*.c; do
        case $source in
            */lengths.c | examples_c/speculate.c | */copies.c | */undo.c | examples_c/adam.c | */threads.c) ;;
            *) listed "C program $source" c_program "$source" ;;
        esac
    done
}

c_program() {
    folder=$library program=$work/c.$(printf '%s' "${1%.c}" | tr / _)
    [ "$(head -n 1 "$1")" != '// Build: probe' ] || folder=$work/probe
    aarch64-linux-gnu-gcc -std=c11 -O1 -Wall -Wextra -Werror -Iinclude "$1" -L"$folder" -lspillway -lpthread -lm -ldl \
        -o "$program"
    # Some programs create files in their working folder.
    rm -rf "$program.d"
    mkdir "$program.d"
    cd "$program.d"
    # Exit status 77 means that the program cannot run here; its last line gives the reason.
    SPILLWAY_VECTORS=$root/kernels SPILLWAY_TEST_EMULATOR=$tools/bin/qemu qemu=$tools/bin/qemu \
        arm max -E LD_LIBRARY_PATH="$folder" "$program"
}

golden_vectors() {
    aarch64-linux-gnu-gcc -std=c11 -O1 -Wall -Wextra -Werror -Iinclude ffi_tests/c/golden.c -L"$library" -lspillway \
        -lpthread -lm -ldl -o "$work/golden"
    ln -sf libspillway.so "$library/libspillway.so.2"
    for cpu in $(printf '%s\n' "$cpus" | cut -d: -f1); do
        check "the golden vectors on $cpu" golden_on "$cpu"
    done
}

golden_on() {
    SPILLWAY_VECTORS=$root/kernels arm "$1" -E LD_LIBRARY_PATH="$library" "$work/golden"
}

preload_optimizers() {
    mkdir -p "$work/preload"
    ffi_tests/preload/build_optimizers.sh aarch64-linux-gnu-gcc "$work/preload"
    arm max -E LD_PRELOAD="$library/libspillway_preload.so" "$work/preload/optimizers" "$work/preload"
}

digests() {
    expected=$(SPILLWAY_LIBRARY=$target/release/libspillway.so python3 ffi_tests/arm/smoke.py)
    echo "host: $expected"
    for kernel in sve_bf16 sve neon scalar; do
        digest=$(SPILLWAY_KERNEL=$kernel SPILLWAY_LIBRARY=$library/libspillway.so SPILLWAY_NUM_THREADS=3 \
            "$tools/bin/python" ffi_tests/arm/smoke.py)
        echo "$digest"
        [ "$digest" = "$kernel ${expected#* }" ]
    done
}

wheel() {
    eval "$("$root/packaging/python_env.sh" --export)"
    rm -rf "$work/site"
    "$tools/bin/pip" install --quiet --no-index --no-deps --no-compile --target "$work/site" "$work"/dist/*.whl
    expected=$(SPILLWAY_LIBRARY=$target/release/libspillway.so PYTHONPATH=packaging/python "$SPILLWAY_PYTHON" -B \
        ffi_tests/arm/wheel.py)
    echo "host: $expected"
    installed=$(PYTHONPATH=$work/site "$tools/bin/python" -B ffi_tests/arm/wheel.py)
    echo "$installed"
    [ "$installed" = "$work/site/spillway/libspillway.so sve_bf16 ${expected##* }" ]
}

archive() {
    rm -rf "$work/unpacked"
    mkdir "$work/unpacked"
    tar -C "$work/unpacked" -xzf "$work"/dist/*-linux-aarch64.tar.gz
    prefix=$work/unpacked/usr/local
    flags=$(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --define-variable=prefix="$prefix" --cflags --libs spillway)
    # shellcheck disable=SC2086 # flags are words
    aarch64-linux-gnu-gcc -std=c11 -Wall -Wextra -Werror examples_c/adam.c $flags -lm -o "$work/unpacked/adam"
    arm max -E LD_LIBRARY_PATH="$prefix/lib" "$work/unpacked/adam"
}

# Faults to insert into the SVE kernels, each of which the checker must detect. Tabs separate the words of a line: the
# name, the objects that contain the fault, the file, and the fault as a sed command.
damages() {
    listed 'a wrong rounding constant' 'adam_sve undo_sve' sve.h 's/svdup_n_u32(0x7fff)/svdup_n_u32(0x8000)/'
    listed 'a tail without predicate' adam_sve adam_sve.c 's/step(svwhilelt_b32_u64(done, n)/step(svptrue_b32()/'
    listed 'an unfused multiply' adam_sve adam_sve.c \
        's/svmla_n_f32_x(active, p, change, rule->step_size)/svadd_f32_x(active, p, svmul_n_f32_x(active, change, rule->step_size))/'
    listed 'a difference without its sign' undo_sve log_sve.h 's/bits <= 0x7f /bits <= 0xff /'
    listed 'a zero without its sign' undo_sve undo_sve.c \
        's/svcmpne_n_u32(some, both(m, v), 0)/svcmpne_n_u32(some, svlsl_n_u32_x(some, both(m, v), 1), 0)/'
    listed 'an estimate of a moment that was zero' undo_sve undo_sve.c 's/moments = 0;/moments = count;/'
}

mutants() {
    listed 'a kernel that cannot be compiled stops the build' no_kernel_no_build
    damages | some 3 | while IFS=$tab read -r name _; do
        listed "the checkers catch $name" caught "$name"
    done
}

# Builds the checkers of the kernels once and links them several times: with the crate's own kernels, and with each
# set of damaged ones. rustc deletes its objects after the link, so this script's own linker makes all programs at
# that moment. The name of the linker's folder is a checksum of all inputs of the damaged kernels, so cargo links
# again after a change.
kernel_tests() {
    sum=$({ damages; cat kernels/*.c kernels/*.h ffi_tests/arm/run.sh; } | cksum | cut -d' ' -f1)
    if [ "$(cat "$work/mutants/sum" 2>/dev/null)" != "$sum" ]; then
        rm -rf "$work/mutants"
        mkdir -p "$work/mutants/$sum"
        damages | while IFS=$tab read -r name objects file damage; do damaged "$name" "$objects" "$file" "$damage"; done
        # rustc derives the linker's options from its name.
        write_linker "$work/mutants/$sum/aarch64-linux-gnu-gcc"
        echo "$sum" >"$work/mutants/sum"
    fi
    arm_cargo rustc --release --package spillway-kernels --test kernels --message-format json \
        -- -C linker="$work/mutants/$sum/aarch64-linux-gnu-gcc" >"$work/kernels.json"
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' "$work/kernels.json" >"$work/kernels.tests"
    [ -s "$work/kernels.tests" ]
}

mutant() {
    printf '%s/mutants/%s' "$work" "$(printf '%s' "$1" | tr ' ' _)"
}

# damaged NAME OBJECTS FILE SED: compiles these kernels from a damaged copy of the sources.
damaged() {
    folder=$(mutant "$1")
    mkdir -p "$folder"
    cp kernels/*.c kernels/*.h "$folder"
    sed -i "$4" "$folder/$3"
    if cmp "kernels/$3" "$folder/$3"; then return 1; fi
    for variant in armv8.2-a+sve 'armv8.6-a+sve+bf16 -DUSE_BFCVT'; do
        for object in $2; do
            # shellcheck disable=SC2086 # a variant is words
            aarch64-linux-gnu-gcc -O3 -std=gnu11 -fPIC -ffp-contract=off -fno-math-errno -march=$variant \
                -c "$folder/$object.c" -o "$folder/$object.${variant%% *}.o"
        done
    done
}

# Objects that come before the libraries replace the symbols of the crate.
write_linker() {
    cat >"$1" <<END
#!/bin/sh
set -eu
real=$(command -v aarch64-linux-gnu-gcc)
"\$real" "\$@"
for folder in "$work"/mutants/*/; do
    ls "\$folder"*.o >/dev/null 2>&1 || continue
    for word; do
        shift
        [ "\${last:-}" != -o ] || word=\${folder}checkers
        last=\$word
        set -- "\$@" "\$word"
    done
    "\$real" "\$folder"*.o "\$@"
done
END
    chmod +x "$1"
}

# If the compiler is missing or the source has an error, the build must fail and must not fall back to NEON. The check
# uses a copy of the tree with its own target folder; otherwise cargo would mistake its objects for those of the tree.
no_kernel_no_build() {
    copy=$work/broken
    rm -rf "$copy"
    mkdir -p "$copy"
    find . -mindepth 1 -maxdepth 1 ! -name target ! -name .git -exec cp -pR -t "$copy" {} +
    cd "$copy"
    if CC_aarch64_unknown_linux_gnu=/bin/false tests_of spillway-kernels broken --test kernels --target-dir "$work/broken-target"
    then return 1; fi
    grep 'adam_sve.c' "$work/broken.tests.txt"
    echo '#error broken' >>kernels/undo_sve.c
    if tests_of spillway-kernels broken --test kernels --target-dir "$work/broken-target"; then return 1; fi
    grep 'error broken' "$work/broken.tests.txt"
}

# caught NAME: passes if the checkers fail on the kernels with this fault.
caught() {
    folder=$(mutant "$1")
    [ -x "$folder/checkers" ]
    status=0
    # All cases: the fault shows in few of them.
    SPILLWAY_TEST_LONG=1 arm max,sve-default-vector-length=32 "$folder/checkers" reference >"$folder/caught.txt" 2>&1 || status=$?
    cat "$folder/caught.txt"
    # Status 101 is a failed test, and 128 or more is a signal; any other status means that the checkers did not run.
    [ $status = 101 ] || [ $status -ge 128 ]
}

main "$@"
