#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ranks.sh N PROGRAM [ARGUMENT...]: the Python program in N ranks. Where a signal ends one of them, all are started once
# more, each below a debugger (cuda-gdb, else gdb), which prints the stacks of its threads.
set -euo pipefail
count=$1
shift
run() { "${LAMINA_COMMAND:-$BUILD/bin/lamina}" run -n "$count" "$@"; }

rc=0
PYTHONFAULTHANDLER=1 run "$@" || rc=$?
if ((rc <= 128)); then exit $rc; fi

debugger=$(command -v cuda-gdb || command -v gdb || true)
if [[ -z $debugger ]]; then
  echo "rc $rc: a signal, and there is no debugger here"
  exit $rc
fi
echo "rc $rc: a signal; once more below $debugger"
below=$(mktemp)
trap 'rm -f "$below"' EXIT
cat >"$below" <<END
#!/usr/bin/env bash
exec "$debugger" -q -batch -ex run -ex 'thread apply all bt 15' --args "$PYTHON" "\$@"
END
chmod 700 "$below"
LAMINA_PYTHON=$below run "$@" || true
exit $rc
