#!/bin/bash
# Runs the preload under third-party programs: a table of libaio's own results, fio with checksums, and
# DeepSpeed's compiled async_io op. Exit status 0 passed, 1 failed, 77 nothing could be run. Parts that cannot run
# are ignored and counted.
#
#   SPILLWAY_DEEPSPEED_PYTHON   a Python with torch and deepspeed (default: python3); if there is none,
#                               that part is ignored
#   SPILLWAY_PRELOAD_DIR        folder of the test files (default: a new folder under TMPDIR); should be on a disk
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mktemp -d "${SPILLWAY_PRELOAD_DIR:-${TMPDIR:-/var/tmp}}/preload.XXXXXX") || exit 1
shm=$(mktemp -d /dev/shm/preload.XXXXXX) || shm=
trap 'rm -rf "$work" ${shm:+"$shm"}' EXIT
passed=0 failed=0 ignored=0

check() { # NAME COMMAND...: one line per check, its output only if it fails
  local name=$1
  shift
  if "$@" >"$work/out" 2>&1; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $name"
    tail -n 20 "$work/out"
  fi
}
install_package() { # PACKAGE: quietly, if this may be done at all
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get install -y -q "$1" >/dev/null 2>&1
}
ignore() { # WHAT: REASON
  ignored=$((ignored + 1))
  echo "ignored: $*"
}
preload() { LD_PRELOAD=$library "$@"; }

if [ ! -e /usr/include/libaio.h ] && ! install_package libaio-dev; then
  ignore "libaio's header is missing: apt-get install libaio-dev"
  exit 77
fi
# The same build as in the other runners, so cargo has no more to do.
(cd "$root" && cargo build --quiet --release --lib -p spillway -p spillway-preload -p fakecuda --features spillway/s3) || exit 1
library=${CARGO_TARGET_DIR:-$root/target}/release/libspillway_preload.so
for program in semantics threads contexts; do
  gcc -O1 -Wall -Wextra -Werror -o "$work/$program" "$here/$program.c" -laio -lpthread || exit 1
done

# Runs the same program with libaio, with the preload, with the preload forwarding, and without io_uring.
same_answers() { # ENVIRONMENT... WORDS: the log must hold them
  local words=${*: -1}
  set -- "${@:1:$#-1}"
  preload env SPILLWAY_LOG=warn "$@" timeout 120 "$work/semantics" "$work/file" >"$work/answers" 2>"$work/log"
  diff "$work/native" "$work/answers" && grep -q -- "$words" "$work/log"
}
timeout 120 "$work/semantics" "$work/file" >"$work/native" || { echo "libaio itself fails"; exit 1; }
check "table of answers" same_answers "write of 4096 bytes at offset 8192 to $work/file failed: File too large"
check "table of answers, forwarded" same_answers SPILLWAY_PRELOAD_FORWARD=1 "forwarding to libaio.so.1: SPILLWAY_PRELOAD_FORWARD=1"
no_memory() { # An unprivileged user without locked memory: io_uring_setup gives ENOMEM.
  local open="$work/open"
  mkdir -m 777 "$open" && chmod 755 "$work" && cp "$library" "$work/semantics" "$open"
  (ulimit -l 0 && SPILLWAY_LOG=warn setpriv --reuid=65534 --regid=65534 --clear-groups env \
    LD_PRELOAD="$open/libspillway_preload.so" timeout 120 "$open/semantics" "$open/file" >"$work/answers" 2>"$work/log")
  diff "$work/native" "$work/answers" && grep -q "forwarding to libaio.so.1: io_uring_setup" "$work/log"
}
if [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
  check "table of answers, io_uring refused" no_memory
else
  ignore "io_uring refused: needs root and setpriv"
fi
silent() { preload timeout 120 "$work/semantics" "$work/file" 2>&1 >/dev/null | { ! grep -q .; }; }
check "silence by default" silent
runs_on() { preload env SPILLWAY_PRELOAD_ASYNC=1 timeout 120 "$work/semantics" "$work/file" | diff <(grep -v ^order "$work/native") <(grep -v ^order -); }
check "table of answers, buffered transfers run on" runs_on

# Runs libaio's own test programs: the results under the preload must equal those under libaio.
libaio_case() { # NUMBER
  rm -rf "$harness/testdir" && mkdir "$harness/testdir" && cd "$harness" || return 1
  for name in rofile rwfile wofile; do echo test >"testdir/$name"; done
  timeout 100 "cases/$1.p"
}
if source=$("$here/libaio_source.sh" "$work"); then
  harness=$source/harness
  for case in 2 3 4 5 6 7 11 12 13 14 15 16 18 19 20 21 22 23; do
    make -s -C "$harness" LIBAIO=-laio "cases/$case.p" >"$work/out" 2>&1 || { cat "$work/out"; exit 1; }
    if (libaio_case "$case") >"$work/out" 2>&1; then
      check "libaio's program $case" eval "(LD_PRELOAD=$library libaio_case $case)"
    else
      ignore "libaio's program $case does not pass with libaio here"
    fi
  done
else
  ignore "libaio's own programs: their source cannot be fetched"
fi

# For programs that fetch events without libaio, the preload forwards all calls, and the log reports it.
qemu() { # FORMAT [-w]
  local format=$1
  shift
  qemu-img create -q -f "$format" "$work/disk.$format" 64M &&
    preload env SPILLWAY_LOG=warn timeout 60 qemu-img bench -t none -n -i native -f "$format" "$@" -c 2000 "$work/disk.$format" &&
    grep -q "forwarding to libaio.so.1: the program submits" "$work/out"
}
if command -v qemu-img >/dev/null || install_package qemu-utils; then
  for format in raw qcow2; do
    check "qemu-img reads $format" qemu $format
    check "qemu-img writes $format" qemu $format -w
  done
else
  ignore "qemu-img is missing: apt-get install qemu-utils"
fi
if { command -v mariadbd && command -v mariadb; } >/dev/null ||
  { install_package mariadb-server-core && install_package mariadb-client-core; }; then
  # It waits for a server most of the time, so the checks below run meanwhile.
  "$here/mariadb.sh" "$library" "$work/mariadb" 10 >"$work/mariadb.out" 2>&1 &
  mariadb=$!
else
  mariadb=
  ignore "MariaDB is missing: apt-get install mariadb-server-core mariadb-client-core"
fi

# DeepSpeed's compiled optimizers, with stand-ins for torch and the op.
optimizers() {
  preload env SPILLWAY_LOG=info "$work/optimizers" "$work" && grep -q "libop.so: cpu_adam is served by" "$work/out"
}
"$here/build_optimizers.sh" gcc "$work" || exit 1
check "DeepSpeed's optimizers without torch" optimizers

check "threads on one context, disk" preload timeout 60 "$work/threads" "$work/file"
[ -z "$shm" ] || check "threads on one context, tmpfs" preload timeout 60 "$work/threads" "$shm/file"
check "a pool of contexts under a limit of descriptors" preload timeout 60 "$work/contexts" pool "$work/file"
check "contexts of system calls" preload timeout 60 "$work/contexts" raw "$work/file"
check "buffered reads of threads that end" preload timeout 60 "$work/contexts" ending "$work/file"
check "buffered reads of threads that end, transfers run on" preload env SPILLWAY_PRELOAD_ASYNC=1 timeout 60 "$work/contexts" ending "$work/file"
left_behind() {
  preload env SPILLWAY_LOG=warn "$work/threads" "$work/file" leave 2>"$work/log" || return 1
  cat "$work/log"
  grep -q "write of 4096 bytes at offset 12288 to $work/file failed: Bad address" "$work/log" &&
    grep -q "2 completions were never fetched with io_getevents before exit" "$work/log"
}
check "completions never fetched" left_behind

verified() { # DIRECTORY DIRECT RW DEPTH JOBS THREADS
  preload env SPILLWAY_LOG=error timeout 60 fio --ioengine=libaio --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_state_save=0 \
    --name=job --directory="$1" --direct="$2" --rw="$3" --iodepth="$4" --numjobs="$5" --size=16m \
    --bsrange=4k-128k --group_reporting --thread="$6" --unlink=1 || return 1
  ! grep -q "spillway: preload" "$work/out"
}
bound() { # fio's references to libaio end in the preload, so that the checks below are of it
  LD_DEBUG=bindings preload fio --ioengine=libaio --name=bound --directory="$work" --size=64k --rw=write 2>&1 |
    grep -qa "fio \[0\] to $library \[0\]: normal symbol .io_submit'"
}
if command -v fio >/dev/null || install_package fio; then
  check "fio is served by the preload" bound
  for rw in randwrite write; do
    for depth in 1 4 16 64; do
      for jobs in 1 4; do
        check "fio disk direct $rw depth $depth jobs $jobs" verified "$work" 1 $rw $depth $jobs 0
        check "fio disk buffered $rw depth $depth jobs $jobs" verified "$work" 0 $rw $depth $jobs 1
        [ -z "$shm" ] || check "fio tmpfs $rw depth $depth jobs $jobs" verified "$shm" 0 $rw $depth $jobs 0
      done
    done
  done
else
  ignore "fio is missing: apt-get install fio"
fi

mariadb_ended() {
  wait "$mariadb"
  local status=$?
  cat "$work/mariadb.out"
  return $status
}
[ -z "$mariadb" ] || check "MariaDB after ten kills" mariadb_ended

python=${SPILLWAY_DEEPSPEED_PYTHON:-python3}
aio_handle() { # CASE
  PATH=$(dirname "$(command -v "$python")"):$PATH DS_ACCELERATOR=cpu SPILLWAY_LOG=warn LD_PRELOAD=$library \
    timeout 100 "$python" "$here/aio_handle.py" "$work" "$1"
}
swallowed() {
  aio_handle fault || return 1
  grep -q "returned 1, stored 4194304 of 8388608" "$work/out" &&
    [ "$(grep -c "write of 1048576 bytes at offset [4-7][0-9]* to $work/limited failed: File too large" "$work/out")" = 8 ]
}
round_trips() { aio_handle round && grep -q "served by spillway" "$work/out" && ! grep -q "spillway: preload" "$work/out"; }
if "$python" -c 'import torch, importlib.util as u, sys; sys.exit(u.find_spec("deepspeed") is None)' 2>/dev/null; then
  check "DeepSpeed aio_handle round trips" round_trips
  check "DeepSpeed aio_handle, a fault it swallows" swallowed
else
  ignore "DeepSpeed's op: $python has no torch and deepspeed (pip install torch deepspeed)"
fi

echo "$passed passed, $failed failed, $ignored ignored"
[ "$failed" = 0 ]
