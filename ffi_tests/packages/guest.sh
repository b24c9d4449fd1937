# Runs in the root without a compiler: see run.sh. The folder /packages has the packages.

from_wheel() {
    no_compiler
    began=$(date +%s%N)
    # The shell finds no file inside of the wheel, so the name is expanded first.
    pip=$(echo /usr/share/python-wheels/pip-*.whl)
    python3 "$pip/pip" install --quiet --no-index --break-system-packages /packages/*.whl
    cd /tmp
    python3 /packages/wheel.py >printed
    echo "measured: from the wheel to the digest of the first steps: $((($(date +%s%N) - began) / 1000000)) ms,"
    # Not in a pipe: the times are those of the shell that calls it.
    times >used
    echo "measured: processor time of user and system in it: $(tail -n 1 used)"
    cat printed
    # Library, kernel, digest.
    grep -q '^/usr/local/lib/python[0-9.]*/dist-packages/spillway/libspillway.so ' printed
    spillway --version
    test -f "$(spillway preload-path)"
    spillway doctor --dir /tmp | grep 'kernel'
}

from_debian() {
    no_compiler
    if /packages/adam; then exit 1; fi
    dpkg -i /packages/spillway_*.deb
    /packages/adam | grep learned
    spillway --version
    LD_PRELOAD=libspillway_preload.so python3 -c 'import ctypes; ctypes.CDLL(None).io_submit'
    dpkg --verify spillway
    dpkg -r spillway
    if ls /usr/lib/*/libspillway* /usr/bin/spillway; then exit 1; fi
}

no_compiler() {
    for tool in cc gcc c++ g++ clang cargo rustc; do
        if command -v "$tool"; then exit 1; fi
    done
}

"$1"
