#!/bin/sh
# Install what Mooncake's wheel and the faults' networks need from the system. Where that cannot be done, say so and go on.
PATH="$PATH:/usr/sbin:/sbin"
known() { ldconfig -p | grep -q 'libibverbs\.so\.1 ' && command -v ip > /dev/null; }
install() { apt-get install -y -qq --no-install-recommends libibverbs1 iproute2; }

known && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { install || { apt-get update -qq && install; }; } > /dev/null 2>&1
fi
known || echo "libibverbs.so.1 (the mooncake connector) or ip (make test-faults) is missing: apt-get install libibverbs1 iproute2"
exit 0
