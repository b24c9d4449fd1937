#!/bin/sh
# Installs the library for C and C++ programs: packaging/install.sh PREFIX LIBRARY [PRELOAD [TOOL]]
#
# PREFIX is absolute. LIBRARY is the built libspillway.so; libspillway.a must lie in the same folder. PRELOAD is the
# built libspillway_preload.so and TOOL is the command line tool; both are optional. LIBDIR is the folder of libraries
# below PREFIX, such as lib/x86_64-linux-gnu; the default is lib. If DESTDIR is set, files are written below it, with
# the same contents as without it.
set -eu

if [ $# -lt 2 ] || [ $# -gt 4 ]; then
    echo "usage: $0 PREFIX path/to/libspillway.so [path/to/libspillway_preload.so [path/to/spillway]]" >&2
    exit 2
fi
prefix=$1
library=$2
case $prefix in
    /*) ;;
    *) echo "$0: PREFIX must be absolute, not $prefix" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
headers=$here/../include
header=$headers/spillway/base.h
archive=${library%.so}.a
preload=${3:-}
tool=${4:-}
for file in "$library" "$archive" ${preload:+"$preload"} ${tool:+"$tool"} "$header" "$headers/spillway.h"; do
    [ -f "$file" ] || { echo "$0: $file does not exist" >&2; exit 1; }
done

version=$(sed -n 's/^#define SPW_VERSION "\(.*\)"$/\1/p' "$header")
abi=$(sed -n 's/^#define SPW_ABI_VERSION \([0-9]*\)$/\1/p' "$header")
[ -n "$version" ] && [ -n "$abi" ] || { echo "$0: $header states no version" >&2; exit 1; }

libdir=${LIBDIR:-lib}
case /$libdir/ in
    //* | */../* | */./*) echo "$0: LIBDIR must be a folder below PREFIX, such as lib64, not $libdir" >&2; exit 2 ;;
esac
# The relative path from the folder of libraries to PREFIX.
up=$(printf '%s' "$libdir" | sed -e 's|[^/][^/]*|..|g')
to=${DESTDIR:-}$prefix
lib=$to/$libdir
# pkg-config requires escaped blanks; the other escapes keep sed from reading the path as a pattern.
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

install -d "$to/include/spillway" "$lib/pkgconfig" "$lib/cmake/spillway"
install -m 644 "$headers/spillway.h" "$headers/spillway.hpp" "$to/include/"
install -m 644 "$headers"/spillway/*.h "$headers/spillway/abi.json" "$to/include/spillway/"
install -m 644 "$archive" "$lib/libspillway.a"
# Writes a new file and renames it: programs that have mapped the old file keep it unchanged.
place() {
    install -m 755 "$1" "$3/.$2"
    mv -f "$3/.$2" "$3/$2"
}
place "$library" "libspillway.so.$version" "$lib"
[ -z "$preload" ] || place "$preload" libspillway_preload.so "$lib"
if [ -n "$tool" ]; then
    install -d "$to/bin"
    place "$tool" spillway "$to/bin"
fi
ln -sfn "libspillway.so.$version" "$lib/libspillway.so.$abi"
ln -sfn "libspillway.so.$abi" "$lib/libspillway.so"
fill "$here/spillway.pc.in" "$lib/pkgconfig/spillway.pc"
fill "$here/cmake/spillway-config.cmake.in" "$lib/cmake/spillway/spillway-config.cmake"
fill "$here/cmake/spillway-config-version.cmake.in" "$lib/cmake/spillway/spillway-config-version.cmake"
