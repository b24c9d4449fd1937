#!/bin/sh
# Installs the library for C and C++ programs: packaging/install.sh PREFIX LIBRARY [PRELOAD]
#
# PREFIX is absolute. LIBRARY is the built libspillway.so; libspillway.a is taken from beside it. PRELOAD is the built
# libspillway_preload.so, which is installed too if it is named. LIBDIR is the folder of libraries below PREFIX, such as
# lib/x86_64-linux-gnu; lib, if it is not set. Under DESTDIR, if that is set, the same tree is staged: only where files are
# written changes, not what they say.
set -eu

if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    echo "usage: $0 PREFIX path/to/libspillway.so [path/to/libspillway_preload.so]" >&2
    exit 2
fi
prefix=$1
library=$2
case $prefix in
    /*) ;;
    *) echo "$0: PREFIX must be absolute, not $prefix" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
header=$here/../include/spillway.h
archive=${library%.so}.a
preload=${3:-}
for file in "$library" "$archive" ${preload:+"$preload"} "$header"; do
    [ -f "$file" ] || { echo "$0: $file does not exist" >&2; exit 1; }
done

version=$(sed -n 's/^#define SPW_VERSION "\(.*\)"$/\1/p' "$header")
abi=$(sed -n 's/^#define SPW_ABI_VERSION \([0-9]*\)$/\1/p' "$header")
[ -n "$version" ] && [ -n "$abi" ] || { echo "$0: $header states no version" >&2; exit 1; }

libdir=${LIBDIR:-lib}
case /$libdir/ in
    //* | */../* | */./*) echo "$0: LIBDIR must be a folder below PREFIX, such as lib64, not $libdir" >&2; exit 2 ;;
esac
# From the folder of libraries to PREFIX.
up=$(printf '%s' "$libdir" | sed -e 's|[^/][^/]*|..|g')
to=${DESTDIR:-}$prefix
lib=$to/$libdir
# pkg-config wants blanks escaped; what follows keeps sed from reading the path as a pattern.
quote() {
    printf '%s' "$1" | sed -e 's/ /\\ /g' | sed -e 's/[\\&|]/\\&/g'
}
quoted=$(quote "$prefix")
quoted_libdir=$(quote "$libdir")
fill() {
    sed -e "s|@PREFIX@|$quoted|g" -e "s|@VERSION@|$version|g" -e "s|@ABI@|$abi|g" \
        -e "s|@LIBDIR@|$quoted_libdir|g" -e "s|@UP@|$up|g" "$1" > "$2"
    chmod 644 "$2"
}

install -d "$to/include" "$lib/pkgconfig" "$lib/cmake/spillway"
install -m 644 "$header" "$to/include/spillway.h"
install -m 644 "$archive" "$lib/libspillway.a"
# Written beside and renamed: programs that have the old library mapped keep it whole.
place() {
    install -m 755 "$1" "$lib/.$2"
    mv -f "$lib/.$2" "$lib/$2"
}
place "$library" "libspillway.so.$version"
[ -z "$preload" ] || place "$preload" libspillway_preload.so
ln -sfn "libspillway.so.$version" "$lib/libspillway.so.$abi"
ln -sfn "libspillway.so.$abi" "$lib/libspillway.so"
fill "$here/spillway.pc.in" "$lib/pkgconfig/spillway.pc"
fill "$here/cmake/spillway-config.cmake.in" "$lib/cmake/spillway/spillway-config.cmake"
fill "$here/cmake/spillway-config-version.cmake.in" "$lib/cmake/spillway/spillway-config-version.cmake"
