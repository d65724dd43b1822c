#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sees that the machine has what the build needs from its distribution: room on disk and Debian packages; with the word
# `tests` what they need besides. Installs what is missing if it may, else prints what is missing and stops.
# LAMINA_SKIP_PACKAGES=1 trusts that all is there.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages=(
  g++ cmake ninja-build ccache mold pkg-config libucx-dev libssl-dev libcli11-dev nlohmann-json3-dev libxxhash-dev
  libyaml-cpp-dev libdeflate-dev
)
if [[ "${1:-}" == tests ]]; then packages+=(libgtest-dev libgmock-dev librapidcheck-dev iproute2 gdb); fi

if has_torch; then need_room . 2 "the build"; else need_room . 5 "the build (with torch's CPU build)"; fi

if [[ "${LAMINA_SKIP_PACKAGES:-}" == 1 ]]; then exit 0; fi

# Debian splits python; an interpreter from elsewhere brings its own headers and venv.
python=$(find_python)
if [[ -z "$python" ]]; then
  if [[ "${PYTHON:-python3}" == python3 ]]; then packages+=(python3 python3-venv python3-dev); fi
elif [[ "$("$python" -c 'import sys; print(sys.base_prefix)')" == /usr ]]; then
  name=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  has_headers "$python" || packages+=("$name-dev")
  [[ -x $venv/bin/python ]] || has_venv "$python" || packages+=("$name-venv")
fi

if ! command -v dpkg-query >/dev/null; then
  say "this is not Debian or Ubuntu, so install what these Debian packages hold by your system's own means:"
  say "  ${packages[*]}"
  stop "then run make again with LAMINA_SKIP_PACKAGES=1."
fi

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ "$state" == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then exit 0; fi

as_root=()
if ((EUID != 0)); then
  if ! sudo -n true 2>/dev/null; then
    say "these Debian packages are missing, and only root can install them:"
    stop "  sudo apt-get install --no-install-recommends ${missing[*]}"
  fi
  as_root=(sudo -n)
fi
need_room /var 1 "installing Debian packages"
say "installing Debian packages: ${missing[*]}"
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600 "$@" </dev/null
}
apt update
apt install --no-install-recommends "${missing[@]}"
