#!/bin/sh
# Install what Mooncake's wheel, the faults' networks and the tests of pages and metrics need from the system. Where that
# cannot be done, say so and go on.
PATH="$PATH:/usr/sbin:/sbin"
browser() { command -v chromium || command -v google-chrome || command -v chromium-browser; }
promtool=.venv/bin/promtool
known() { ldconfig -p | grep -q 'libibverbs\.so\.1 ' && command -v ip > /dev/null && browser > /dev/null && test -x $promtool; }
install() {
    apt-get install -y -qq --no-install-recommends libibverbs1 iproute2 chromium || return
    folder=$(mktemp -d) # promtool alone, out of a package that is a server with a user of its own
    (cd "$folder" && apt-get download -qq prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool) &&
        mkdir -p .venv/bin && cp "$folder/usr/bin/promtool" $promtool
    rm -r "$folder"
}

known && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { install || { apt-get update -qq && install; }; } > /dev/null 2>&1
fi
known || echo "libibverbs.so.1 (the mooncake connector), ip (make test-faults), a Chromium or promtool (make test) is" \
    "missing: apt-get install libibverbs1 iproute2 chromium prometheus"
exit 0
