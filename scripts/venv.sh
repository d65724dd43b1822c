#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the environment from PYTHON with torch and what the build and the demo need. What fits is kept. TORCH is the
# version of torch, TORCH_INDEX_URL pip's --index-url for it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
torch_version=${TORCH:-2.13.0}
cpu_index="<the index of CPU builds that PyTorch's installation page names>"
# The bytes that pip fetches for torch's CUDA build of these versions, and those that it takes on disk.
cuda_download_gb=2.7
cuda_disk_gb=5

python=$(find_python)
[[ -n "$python" ]] || stop "there is no ${PYTHON:-python3}: install Python 3.10 or newer, or say where it is with make PYTHON=..."
"$python" -c 'import sys; exit(sys.version_info < (3, 10))' ||
  stop "$python is $("$python" -V 2>&1), and lamina needs 3.10 or newer: say make PYTHON=/path/to/a/newer/python3 (and remove $venv if it is there)."
has_headers "$python" ||
  stop "$python has no Python.h, which the extension needs: install its headers (Debian: python3-dev) or choose another with make PYTHON=..."

if [[ ! -x $venv/bin/python ]]; then
  has_venv "$python" ||
    stop "$python has no venv module: install it (Debian: python3-venv) or choose another with make PYTHON=..."
  say "making $venv from $python"
  "$python" -m venv "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" </dev/null; }

# True when the torch that pip would take needs NVIDIA's libraries. pip only reads the package's metadata for this.
takes_cuda() {
  local report
  report=$(mktemp)
  pip install -q --dry-run --no-deps --report "$report" "${index[@]}" "torch==$torch_version" >/dev/null 2>&1 || return 1
  "$venv/bin/python" - "$report" <<'END'
import json, sys
needs = json.load(open(sys.argv[1]))["install"][0]["metadata"].get("requires_dist", [])
sys.exit(not any(need.startswith(("nvidia-", "cuda-")) for need in needs))
END
  local answer=$?
  rm -f "$report"
  return $answer
}

has_nvidia_driver() { [[ -e /proc/driver/nvidia/version || -e /dev/nvidiactl ]] || command -v nvidia-smi >/dev/null; }

install_torch() {
  local index=()
  if [[ -n "${TORCH_INDEX_URL:-}" ]]; then index=(--index-url "$TORCH_INDEX_URL"); fi
  # Since 23.3 pip asks for metadata without fetching a whole package.
  pip install -q 'pip>=23.3'
  if takes_cuda; then
    if ! has_nvidia_driver; then
      say "pip will take torch's CUDA build: about $cuda_download_gb GB to fetch, $cuda_disk_gb GB on disk, and this machine has no NVIDIA driver."
      say "The CPU build is 0.2 GB: stop this with Ctrl-C and run make TORCH_INDEX_URL=$cpu_index"
    fi
    need_room . $((cuda_disk_gb + 4)) "the build with torch's CUDA build (TORCH_INDEX_URL=$cpu_index takes the small one)"
  fi
  say "installing torch $torch_version"
  pip install --no-compile "${index[@]}" "torch==$torch_version"
}

found=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
if [[ "${found%%+*}" != "$torch_version" ]]; then install_torch; fi
say "installing what requirements.txt names"
pip install -q --no-compile -r requirements.txt
# Bytecode by all processors at once, where pip takes one. Where PYTHONDONTWRITEBYTECODE is set, no import would leave
# any.
say "compiling what was installed"
"$venv/bin/python" -m compileall -q -j "$(nproc)" "$venv/lib" >/dev/null || true
