# SPDX-License-Identifier: Apache-2.0
# Read by the other scripts: messages, room on disk, the python in use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The virtual environment, below the checkout.
venv=${LAMINA_VENV:-.venv}

say() { printf 'lamina: %s\n' "$*" >&2; }
stop() {
  say "$@"
  exit 1
}

# Stops unless the file system of folder $1 has $2 GB free, needed for $3.
need_room() {
  local free_gb
  free_gb=$(($(df --output=avail -k "$1" | tail -n 1) / 1000000))
  if ((free_gb < $2)); then
    stop "$3 needs about $2 GB in $1, and $free_gb GB are free: make room and run make again."
  fi
}

has_torch() { compgen -G "$venv/lib/python3*/site-packages/torch/version.py" >/dev/null; }

# The interpreter of the environment once it exists, else the one asked for with PYTHON; empty when there is none.
find_python() {
  if [[ -x $venv/bin/python ]]; then
    echo "$venv/bin/python"
  else
    command -v "${PYTHON:-python3}" || true
  fi
}

# True when interpreter $1 has its C headers.
has_headers() { "$1" -c 'import os, sysconfig; exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; }

# True when interpreter $1 can make a virtual environment (Debian packs venv without ensurepip).
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
