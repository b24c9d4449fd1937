#!/bin/sh
# Stores the C interface of a new SPW_ABI_VERSION in ffi_tests/abi/frozen/VERSION. It refuses a version that is stored already.
#
#   ffi_tests/abi/freeze.sh
#
# The headers, exports.txt and layout.txt must be current. Headers marked EXPERIMENTAL are left out, with their functions and
# structs, and the examples that include them. Programs that are no example, such as sizes.c, are copied by hand from the version
# before; then SHA256SUMS is made anew.
set -eu
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^#define SPW_ABI_VERSION \([0-9]*\)$/\1/p' include/spillway/base.h)
[ -n "$version" ] || { echo "freeze: include/spillway/base.h has no SPW_ABI_VERSION" >&2; exit 1; }
frozen=ffi_tests/abi/frozen/$version
[ ! -e "$frozen" ] || { echo "freeze: $frozen exists; a frozen interface is never stored again" >&2; exit 1; }
mkdir -p "$frozen/include/spillway" "$frozen/programs"

experimental=$(grep -l EXPERIMENTAL include/spillway/*.h)
for header in include/spillway/*.h; do
    case " $(echo $experimental) " in
        *" $header "*) ;;
        *) cp "$header" "$frozen/include/spillway/" ;;
    esac
done
cp include/spillway.h "$frozen/include/"

# Lines of a list whose function or struct the frozen headers declare.
code=$(cat "$frozen"/include/spillway/*.h | grep -v '^ *//')
named() {
    while read -r line; do
        name=${line%%[ .]*}
        ! printf '%s' "$code" | grep -qw "$name" || printf '%s\n' "$line"
    done <"$1"
}
named ffi_tests/exports.txt >"$frozen/exports.txt"
named ffi_tests/layout.txt >"$frozen/layout.txt"
awk '/^typedef enum / { enum = $3 }
     /^}/ { enum = "" }
     enum != "" && /^ *SPW_[A-Z0-9_]* = / { sub(",", "", $3); print enum "." $1, $3 }' \
    "$frozen"/include/spillway/*.h | LC_ALL=C sort >"$frozen/enums.txt"

for program in examples_c/*.c; do
    grep -q "$(basename -a $experimental)" "$program" || cp "$program" "$frozen/programs/"
done
(cd "$frozen" && find . -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)
echo "stored: $frozen"
