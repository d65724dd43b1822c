#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# memcheck.sh N PROGRAM [ARGUMENT...]: the Python program in N ranks, each below compute-sanitizer, which tells of kernels
# that reach beyond their memory.
set -euo pipefail
count=$1
shift
sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer || true)
if [[ -z $sanitizer ]]; then
  echo "there is no compute-sanitizer here"
  exit 77
fi
below=$(mktemp)
trap 'rm -f "$below"' EXIT
cat >"$below" <<END
#!/usr/bin/env bash
exec "$sanitizer" --tool memcheck --error-exitcode 9 --target-processes all "$PYTHON" "\$@"
END
chmod 700 "$below"
LAMINA_PYTHON=$below "${LAMINA_COMMAND:-$BUILD/bin/lamina}" run -n "$count" "$@"
