#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the targets that it is given in a Debian 13 of its own, as the Dockerfile does, without a container engine. Its
# tree, build/debian13, is kept for the next time. pip takes its settings (PIP_*), and the certificates that they name, along.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tree=$PWD/build/debian13
((EUID == 0)) || stop "only root can enter another system's tree: run this as root."
command -v debootstrap >/dev/null || stop "this needs debootstrap: apt-get install debootstrap"
need_room . 14 "Debian 13 with torch's CUDA build"

if [[ ! -e $tree/.made ]]; then
  rm -rf "$tree"
  debootstrap --variant=minbase trixie "$tree"
  touch "$tree/.made"
fi
mkdir -p "$tree/lamina"
git ls-files -co --exclude-standard -z | while IFS= read -r -d "" file; do
  if [[ -e $file ]]; then printf "%s\\0" "$file"; fi
done |
  tar -c --null -T - | tar -x -C "$tree/lamina"
cp /etc/hosts /etc/resolv.conf "$tree/etc/"

settings=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8)
for name in "${!PIP_@}"; do settings+=("$name=${!name}"); done
if [[ -n "${PIP_CERT:-}" ]]; then
  cp "$PIP_CERT" "$tree/root/pip.pem"
  settings+=(PIP_CERT=/root/pip.pem)
fi

# Mounts of a name space of its own end with it.
export tree
exec unshare --mount --propagation private bash -euc '
  for folder in proc sys dev; do mount --rbind "/$folder" "$tree/$folder"; done
  exec chroot "$tree" /usr/bin/env -i "$@"' bash "${settings[@]}" /lamina/scripts/bare_debian.sh "$@"
