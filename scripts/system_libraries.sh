#!/bin/sh
# Install what Mooncake's wheel needs from the system. Where that cannot be done, say so and let the set-up go on.
PATH="$PATH:/usr/sbin:/sbin"
known() { ldconfig -p | grep -q 'libibverbs\.so\.1 '; }
install() { apt-get install -y -qq --no-install-recommends libibverbs1; }

known && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { install || { apt-get update -qq && install; }; } > /dev/null 2>&1
fi
known || echo "libibverbs.so.1 is missing, so the mooncake connector and its tests will not work: apt-get install libibverbs1"
exit 0
