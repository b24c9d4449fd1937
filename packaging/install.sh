#!/bin/sh
# Installs the library for C and C++ programs, and the preload library: packaging/install.sh PREFIX LIBRARY
#
# PREFIX is absolute. LIBRARY is the built libspillway.so; libspillway.a and libspillway_preload.so are taken from beside
# it. Under DESTDIR, if that is set, the same tree is staged: only where files are written changes, not what they say.
set -eu

if [ $# -ne 2 ]; then
    echo "usage: $0 PREFIX path/to/libspillway.so" >&2
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
preload=${library%.so}_preload.so
for file in "$library" "$archive" "$preload" "$header"; do
    [ -f "$file" ] || { echo "$0: $file does not exist" >&2; exit 1; }
done

version=$(sed -n 's/^#define SPW_VERSION "\(.*\)"$/\1/p' "$header")
abi=$(sed -n 's/^#define SPW_ABI_VERSION \([0-9]*\)$/\1/p' "$header")
[ -n "$version" ] && [ -n "$abi" ] || { echo "$0: $header states no version" >&2; exit 1; }

to=${DESTDIR:-}$prefix
# pkg-config wants blanks escaped; what follows keeps sed from reading the path as a pattern.
quoted=$(printf '%s' "$prefix" | sed -e 's/ /\\ /g' | sed -e 's/[\\&|]/\\&/g')
fill() {
    sed -e "s|@PREFIX@|$quoted|g" -e "s|@VERSION@|$version|g" -e "s|@ABI@|$abi|g" "$1" > "$2"
    chmod 644 "$2"
}

install -d "$to/include" "$to/lib/pkgconfig" "$to/lib/cmake/spillway"
install -m 644 "$header" "$to/include/spillway.h"
install -m 644 "$archive" "$to/lib/libspillway.a"
# Written beside and renamed: programs that have the old library mapped keep it whole.
place() {
    install -m 755 "$1" "$to/lib/.$2"
    mv -f "$to/lib/.$2" "$to/lib/$2"
}
place "$library" "libspillway.so.$version"
place "$preload" libspillway_preload.so
ln -sfn "libspillway.so.$version" "$to/lib/libspillway.so.$abi"
ln -sfn "libspillway.so.$abi" "$to/lib/libspillway.so"
fill "$here/spillway.pc.in" "$to/lib/pkgconfig/spillway.pc"
fill "$here/cmake/spillway-config.cmake.in" "$to/lib/cmake/spillway/spillway-config.cmake"
fill "$here/cmake/spillway-config-version.cmake.in" "$to/lib/cmake/spillway/spillway-config-version.cmake"
