#!/usr/bin/env bash
# Installs the Debian packages of apt.txt that are missing; says which, and goes on without them where it may not.
set -euo pipefail
cd "$(dirname "$0")"
missing=()
for package in $(grep -v '^#' apt.txt); do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Not installed (needs root and apt-get): ${missing[*]}. Backends that need them will say so." >&2
  exit 0
fi
echo "   installing Debian packages: ${missing[*]}"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
