#!/bin/sh
# Proves the Arm library under qemu, on a machine that is no Arm: bits, bounds, choice of kernel, callers, instructions.
#
# The first run sets the tool chain up (packaging/arm_env.sh); exit status 77 means that root has to install packages.
# What a failed part printed is in the folder that the last line names.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
settings=$("$root/packaging/arm_env.sh" --export) || exit $?
tools=$("$root/packaging/arm_env.sh")
target=${CARGO_TARGET_DIR:-$root/target}
work=$target/arm
library=$target/aarch64-unknown-linux-gnu/release
passed=0
failed=0
tab=$(printf '\t')

export RUST_BACKTRACE=0

# Processors, and the kernels that are checked on each: NEON and scalar do not know how long a vector of SVE is, and the two of
# SVE, which differ in how they round to bf16, take turns on long ones. 48 bytes is a length that divides neither a cache line
# nor the lanes of a sum.
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
    check 'the library, its tests, its packages and the host library build' build
    if [ $failed = 0 ]; then
        choice_of_kernel
        golden_vectors
        longer_checks >"$work/checks"
        two_at_a_time
        echo "skip    ffi_tests/c/lengths.c steps 2^33 elements, hours of emulation; a kernel sees 2^16 at a time"
    fi
    echo "$passed passed, $failed failed (output in $work)"
    [ $failed = 0 ]
}

# check NAME COMMAND...: one line of the result.
check() {
    perform "$@"
    count "$1"
}

# Leaves what the command printed in the log of NAME, and its status beside it.
perform() {
    name=$1 log=$(log_of "$1") began=$(date +%s)
    shift
    # Not inside the condition, where the shell would go on after a failed command.
    set +e
    (set -e && "$@") </dev/null >"$log" 2>&1
    status=$?
    set -e
    echo $status >"$log.status"
    if [ $status = 0 ]; then
        echo "ok      $name ($(($(date +%s) - began)) s)"
    else
        echo "FAILED  $name ($(($(date +%s) - began)) s)"
        tail -n 15 "$log" | sed 's/^/        /'
    fi
}

log_of() {
    printf '%s/%s.log' "$work" "$(printf '%s' "$1" | tr -c 'a-zA-Z0-9' _)"
}

count() {
    if [ "$(cat "$(log_of "$1").status")" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

# Each line of $work/checks is one, its words apart by tabs.
two_at_a_time() {
    rm -rf "$work/taken" "$work"/*.status
    mkdir "$work/taken"
    lane &
    lane
    wait $!
    while IFS=$tab read -r name _; do count "$name"; done <"$work/checks"
}

# Takes the next line that the other lane has not taken.
lane() {
    number=0
    while IFS=$tab read -r name command a b c; do
        number=$((number + 1))
        mkdir "$work/taken/$number" 2>/dev/null || continue
        perform "$name" "$command" "$a" "$b" "$c"
    done <"$work/checks"
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
    # Both from one folder: they differ in the last crate alone, which need not be fast where a panic is all that counts.
    arm_cargo rustc --release --lib --no-default-features --features probe -- -C opt-level=0
    mkdir -p "$work/probe"
    cp "$library/libspillway.so" "$work/probe/libspillway.so.1"
    ln -sf libspillway.so.1 "$work/probe/libspillway.so"
    arm_cargo build --release --lib --no-default-features --package spillway --package spillway-preload
    tests_of spillway-kernels kernels --test kernels
    tests_of spillway library --lib
    # As the Python tests build it.
    cargo build --release --lib --package spillway --package fakecuda --features spillway/s3
    aarch64-linux-gnu-gcc -std=c11 -O1 -static -Wall -Wextra -Werror -Iinclude ffi_tests/arm/one_step.c \
        "$library/libspillway.a" -lm -o "$work/one_step"
    cc -std=gnu11 -O2 -shared -fPIC -Wall -Wextra -Werror ffi_tests/arm/icount.c -o "$work/icount.so"
    # As `make dist` makes them.
    rm -rf "$work/dist"
    eval "$("$root/packaging/python_env.sh" --export)"
    PIP_NO_BUILD_ISOLATION=no PYTHON=$SPILLWAY_PYTHON \
        packaging/package.sh aarch64 "$library/libspillway.so" "$work/dist"
}

# tests_of PACKAGE NAME OPTION...: builds its tests as a release is built, and leaves their path in $work/NAME.tests.
tests_of() {
    package=$1 tests=$work/$2.tests
    shift 2
    rm -f "$tests"
    arm_cargo test --release --no-default-features --package "$package" --no-run "$@" >"$tests.txt" 2>&1 ||
        { cat "$tests.txt"; return 1; }
    sed -n 's/.*Executable .*(\(.*\))$/\1/p' "$tests.txt" >"$tests"
    [ -s "$tests" ]
}

# Those of more than a moment. The unit tests have two threads of their own, so that C programs with a clock wait for their end.
longer_checks() {
    listed "the library's unit tests" library_tests
    listed 'a C program builds against the unpacked archive and runs' archive
    printf '%s\n' "$cpus" | while IFS= read -r line; do
        listed "the checkers of the kernels on ${line%%:*}: ${line#*:}" checkers "$line"
    done
    mutants
    listed 'every kernel and the host give the same digest through Python, in forked children too' digests
    listed 'the wheel installs into an Arm Python, and its optimizers come to the digest of the host' wheel
    listed 'instructions per element are within the table' "$root/ffi_tests/arm/icount.sh"
    c_programs
}

# listed NAME COMMAND...
listed() {
    (IFS=$tab && printf '%s\n' "$*")
}

# The checker says how many cases it ran on which kernels; fewer than 756, or others than expected, is a failure.
checkers() {
    cpu=${1%%:*} kernels=${1#*:}
    SPILLWAY_TEST_EMULATOR=1 SPILLWAY_TEST_KERNELS=$kernels arm "$cpu" "$(cat "$work/kernels.tests")" --nocapture |
        cut -c1-300 >"$work/kernels.$cpu.txt"
    cat "$work/kernels.$cpu.txt"
    grep -q '^test result: ok' "$work/kernels.$cpu.txt"
    cases=$(sed -n "s/.*\b\([0-9][0-9]*\) cases on each of $kernels\$/\1/p" "$work/kernels.$cpu.txt")
    [ "${cases:-0}" -ge 756 ]
}

# What does not depend on the processor runs on one. What is skipped reserves terabytes of addresses, for each page of which
# qemu-user keeps a record; asks for MADV_DONTFORK, which qemu-user ignores; starts itself as another process, which the host
# cannot; or takes minutes and proves nothing of this processor: the interpreter of PTX, crashes of a simulated disk or
# store, all 2^32 patterns of a split in whole numbers, and the search for the best of all plans.
library_tests() {
    set --
    for skipped in far_more_than_the_machine_has real_processes_exclude gpu::tests::bits interleave::tests::cuda a_crash_at_any \
        is_not_there_in_a_forked_child sys::lock::tests in_flight::a_forked_child in_flight::a_tier_ \
        tier::tests::crash tier::tests::before swap::tests::split all_patterns_come_back choose::tests; do
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

# runs FORCED NAME CPU THIS OTHER: the library names NAME, executes functions called THIS and none called OTHER.
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
    grep -q "this processor has no $1" "$work/refused"
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
    # Some make files where they run.
    rm -rf "$program.d"
    mkdir "$program.d"
    cd "$program.d"
    status=0
    SPILLWAY_VECTORS=$root/kernels SPILLWAY_TEST_EMULATOR=$tools/bin/qemu qemu=$tools/bin/qemu \
        arm max -E LD_LIBRARY_PATH="$folder" "$program" || status=$?
    [ $status = 0 ] || [ $status = 77 ]
}

golden_vectors() {
    aarch64-linux-gnu-gcc -std=c11 -O1 -Wall -Wextra -Werror -Iinclude ffi_tests/c/golden.c -L"$library" -lspillway \
        -lpthread -lm -ldl -o "$work/golden"
    ln -sf libspillway.so "$library/libspillway.so.1"
    for cpu in $(printf '%s\n' "$cpus" | cut -d: -f1); do
        check "the golden vectors on $cpu" golden_on "$cpu"
    done
}

golden_on() {
    SPILLWAY_VECTORS=$root/kernels arm "$1" -E LD_LIBRARY_PATH="$library" "$work/golden"
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

# Damages the SVE kernels; a checker that does not notice proves nothing.
mutants() {
    listed 'a kernel that cannot be compiled stops the build' no_kernel_no_build
    listed 'the checkers catch a wrong rounding constant' caught 'adam_sve undo_sve' sve.h 's/svdup_n_u32(0x7fff)/svdup_n_u32(0x8000)/'
    listed 'the checkers catch a tail without predicate' caught adam_sve adam_sve.c \
        's/step(svwhilelt_b32_u64(done, n)/step(svptrue_b32()/'
    listed 'the checkers catch an unfused multiply' caught adam_sve adam_sve.c \
        's/svmla_n_f32_x(active, p, change, rule->step_size)/svadd_f32_x(active, p, svmul_n_f32_x(active, change, rule->step_size))/'
    listed 'the checkers catch a difference without its sign' caught undo_sve log_sve.h 's/bits <= 0x7f /bits <= 0xff /'
}

# Neither for want of a compiler nor for an error in the source may NEON silently take the kernels' place. In a copy of the
# tree with a target folder of its own: cargo would take its objects for those of the tree.
no_kernel_no_build() {
    copy=$work/broken
    rm -rf "$copy"
    mkdir -p "$copy"
    cp -pR Cargo.toml Cargo.lock build.rs src kernels include ffi_tests packaging "$copy"
    cd "$copy"
    if CC_aarch64_unknown_linux_gnu=/bin/false tests_of spillway-kernels broken --test kernels --target-dir "$work/broken-target"
    then return 1; fi
    grep 'adam_sve.c' "$work/broken.tests.txt"
    echo '#error broken' >>kernels/undo_sve.c
    if tests_of spillway-kernels broken --test kernels --target-dir "$work/broken-target"; then return 1; fi
    grep 'error broken' "$work/broken.tests.txt"
}

# caught OBJECTS FILE SED: links these kernels, damaged, before the crate's own in the program of the tests.
caught() {
    folder=$work/mutant.$(printf '%s' "$3" | cksum | cut -d' ' -f1)
    rm -rf "$folder"
    mkdir -p "$folder"
    cp kernels/*.c kernels/*.h "$folder"
    sed -i "$3" "$folder/$2"
    if cmp "kernels/$2" "$folder/$2"; then return 1; fi
    objects=
    for variant in armv8.2-a+sve 'armv8.6-a+sve+bf16 -DUSE_BFCVT'; do
        for file in $1; do
            object=$folder/$file.${variant%% *}.o
            # shellcheck disable=SC2086 # a variant is words
            aarch64-linux-gnu-gcc -O3 -std=gnu11 -fPIC -ffp-contract=off -fno-math-errno -march=$variant \
                -c "$folder/$file.c" -o "$object"
            objects="$objects '$object'"
        done
    done
    # By its name rustc knows how to talk to it.
    linker=$folder/aarch64-linux-gnu-gcc
    printf '#!/bin/sh\nexec %s%s "$@"\n' "$(command -v aarch64-linux-gnu-gcc)" "$objects" >"$linker"
    chmod +x "$linker"
    arm_cargo rustc --release --no-default-features --package spillway-kernels --test kernels --message-format json \
        -- -C linker="$linker" >"$folder/cargo.json"
    tests=$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' "$folder/cargo.json")
    status=0
    arm max,sve-default-vector-length=32 "$tests" reference >"$folder/caught.txt" 2>&1 || status=$?
    cat "$folder/caught.txt"
    # 101 is a failed test, 128 and more a signal; anything else is no verdict of the checker.
    [ $status = 101 ] || [ $status -ge 128 ]
}

main "$@"
