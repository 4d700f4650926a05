#!/bin/sh
# Install what Mooncake's wheel, the faults' networks and the tests of pages need from the system. Where that cannot be
# done, say so and go on.
PATH="$PATH:/usr/sbin:/sbin"
browser() { command -v chromium || command -v google-chrome || command -v chromium-browser; }
known() { ldconfig -p | grep -q 'libibverbs\.so\.1 ' && command -v ip > /dev/null && browser > /dev/null; }
install() { apt-get install -y -qq --no-install-recommends libibverbs1 iproute2 chromium; }

known && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { install || { apt-get update -qq && install; }; } > /dev/null 2>&1
fi
known || echo "libibverbs.so.1 (the mooncake connector), ip (make test-faults) or a Chromium (make test) is missing:" \
    "apt-get install libibverbs1 iproute2 chromium"
exit 0
