#!/bin/bash
# two_hosts.sh CMD...: run CMD with two "hosts" a (10.77.0.1) and b (10.77.0.2), joined by a veth pair. `on a CMD` runs CMD on one.
# Own net/mount/pid/ipc namespaces: everything (links, rules, processes, /dev/shm files) is gone when CMD ends, even by SIGKILL.
[ "$MH_IN" ] || exec env MH_IN=1 unshare $([ "$(id -u)" = 0 ] || echo -Ur) -nmp --propagation private --fork --kill-child --mount-proc bash "$0" "$@"
set -e
mount -t tmpfs mh /run; mkdir /run/bin; export PATH=/run/bin:$PATH
printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 mh-a' '10.77.0.2 mh-b' >/run/hosts; mount --bind /run/hosts /etc/hosts
for h in a b; do
  unshare -nmiup --fork --mount-proc sh -c "hostname mh-$h; mount -t tmpfs shm /dev/shm; ip link set lo up; touch /run/$h.up; sleep infinity; :" & p=$!
  until [ -e /run/$h.up ]; do sleep .01; done
  c=$(cat /proc/$p/task/$p/children); echo ${c% } >/run/$h.pid
done
cat >/run/bin/on <<'S'
#!/bin/sh
h=$1; shift; exec nsenter -t $(cat /run/$h.pid) -n -m -i -u -p --wdns="$PWD" -- "$@"
S
chmod +x /run/bin/on; A=$(cat /run/a.pid) B=$(cat /run/b.pid)
ip link add eth0 netns $A type veth peer name eth0 netns $B
i=0; for h in a b; do i=$((i+1)); on $h ip addr add 10.77.0.$i/24 dev eth0; on $h ip link set eth0 up; done
"$@"
