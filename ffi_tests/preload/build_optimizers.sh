#!/bin/sh
# Builds optimizers.c in DIRECTORY: the program, and the stand-ins for torch and for a compiled op.
#
#   build_optimizers.sh COMPILER DIRECTORY
set -eu
source=$(dirname "$0")/optimizers.c
flags='-O1 -Wall -Wextra -Werror'
# shellcheck disable=SC2086 # the flags are words
"$1" $flags -shared -fPIC -DTORCH -Wl,-soname,libtorch_cpu.so "$source" -o "$2/libtorch_cpu.so"
# shellcheck disable=SC2086
"$1" $flags -shared -fPIC -DOP "$source" -o "$2/libop.so"
# shellcheck disable=SC2086
"$1" $flags "$source" -ldl -o "$2/optimizers"
