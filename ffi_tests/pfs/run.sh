#!/bin/bash
# Runs the tests of tiers on parallel, network and local file systems that it sets up.
#
#   ffi_tests/pfs/run.sh [--install] NAMES [OPTION...]     names in filesystems.py with commas, or `all`; options go to pytest
#   ffi_tests/pfs/run.sh --bench NAME [ARGUMENT...]        measures instead: see ffi_tests/bench/pfs_fio.py
#
# --install: installs the packages of each file system first; one whose packages cannot be installed is ignored.
# Each file system has a run of its own, with its own mounts, network and process ids, and four run at a time. Servers are
# reached on the run's own loopback alone. The kernel ends every process and mount with the run, also if a test is killed.
# Exit status 77: nothing can run; a line says why.
set -u

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
way=""
case $1 in --install | --bench)
    way=$1
    shift
    ;;
esac
names=$1
shift

cannot() {
    echo "ignored: file systems $names: $1"
    exit 77
}

# inside NAME COMMAND...: runs a command in namespaces of its own, which end with it. The first process waits for orphans. Logs
# and sockets of servers that are in fixed places are in a tmpfs.
inside() {
    mkdir "$work/$1"
    SPILLWAY_PFS=$work/$1 unshare --mount --net --pid --fork --kill-child --mount-proc sh -c '
        shift
        for folder in /run /var/log/glusterfs; do
            [ ! -d $folder ] || mount -t tmpfs none $folder
        done
        "$@"
        exit $?' sh "$@"
}

# tested NAME OPTION...
tested() {
    local name=$1
    shift
    inside "$name" "$SPILLWAY_PYTHON" -m pytest -p no:cacheprovider --basetemp "$work/$name/tests" --filesystem "$name" \
        -v -o console_output_style=count --durations=10 --durations-min=1 -rs "$here" "$@" >"$work/$name.log" 2>&1
}

[ "$(id -u)" = 0 ] || cannot "mounting them needs root"
unshare --mount --net --pid --fork true 2>/dev/null || cannot "unshare does not work here"
eval "$("$root/packaging/python_env.sh" --export)"
names=$("$SPILLWAY_PYTHON" "$here/filesystems.py" "$names") || exit 2
work=$(mktemp -d "${TMPDIR:-/var/tmp}/spillway-pfs.XXXXXX")
# A mount ends a moment after its last process.
trap 'rm -rf "$work" 2>/dev/null || { sleep 1; rm -rf "$work"; }' EXIT
if [ "$way" = --bench ]; then
    inside "$names" "$SPILLWAY_PYTHON" "$root/ffi_tests/bench/pfs_fio.py" "$names" "$@"
    exit
fi
fitting=()
for name in $names; do
    if [ -n "$way" ]; then
        # shellcheck disable=SC2046
        "$root/packaging/system_packages.sh" $("$SPILLWAY_PYTHON" "$here/filesystems.py" --packages "$name") || true
    fi
    reason=$("$SPILLWAY_PYTHON" "$here/filesystems.py" --reason "$name")
    if [ -n "$reason" ]; then echo "ignored: $name: $reason"; else fitting+=("$name"); fi
done
[ ${#fitting[@]} != 0 ] || exit 77
status=0
declare -A running=()
for name in "${fitting[@]}"; do
    if [ ${#running[@]} = 4 ]; then
        wait -n -p ended "${!running[@]}" || status=1
        cat "$work/${running[$ended]}.log"
        unset "running[$ended]"
    fi
    tested "$name" "$@" &
    running[$!]=$name
done
for pid in "${!running[@]}"; do
    wait "$pid" || status=1
    cat "$work/${running[$pid]}.log"
done
exit $status
