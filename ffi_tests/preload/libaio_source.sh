#!/bin/sh
# Fetches the source of the installed version of libaio from this machine's Debian mirror into DIRECTORY, and prints its
# path. Exit status 1 if the source is unavailable.
#
#   libaio_source.sh DIRECTORY
set -eu
package=$(apt-get download --print-uris libaio-dev 2>/dev/null | sed -n "s/^'\([^']*\)'.*/\1/p")
version=${package##*/libaio-dev_}
version=${version%%-*}
[ -n "$version" ]
curl -sfL --max-time 60 -o "$1/libaio.tar.gz" "${package%/*}/libaio_$version.orig.tar.gz"
tar -C "$1" -xzf "$1/libaio.tar.gz"
echo "$1/libaio-$version"
