#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks lamina on an accelerator: runs the stages of scripts/gpu_check/stages, each within its limit, or those whose
# names begin with a word that is given. The page, $OUT (build/gpu-check.md), grows by stage, so that what was found is
# there whenever the machine is taken away. Exits with 1 where a stage fails, and where there is no accelerator.
#   LAMINA_DEVICE=emulated   the type of the device; by default the accelerator that torch sees
#   WITHIN_S=900             seconds for all of it: a machine is lent for that long
#   STAGES_FILE=...          another table
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export OUT=${OUT:-build/gpu-check.md}
table=${STAGES_FILE:-scripts/gpu_check/stages}
python=$(find_python)
[[ -n $python ]] || stop "there is no ${PYTHON:-python3}: name one that has torch, make gpu-check PYTHON=..."
# Stages run with a Python that has torch, this tree's engine, and a pack's UCX. A type of devices that torch does not
# know by itself has a module (tests/emulated).
PYTHON=$(realpath -s "$python")
export PYTHON CHECK=$PWD/scripts/gpu_check BUILD=$PWD/build/release PACK=$PWD/build/gpu-pack LAMINA_PYTHON=$PYTHON
export PYTHONPATH=$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Not beside another accelerator: torch takes a device that is added for the only one. Its kernels share the cores.
if [[ ${LAMINA_DEVICE:-} == emulated* ]]; then
  PYTHONPATH=$PWD/build/emulated:$PYTHONPATH
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
if [[ -d $PACK ]]; then export LAMINA_UCX=$PACK/libucx/lib; fi
within=${WITHIN_S:-900}
shown_lines=40
not_here=77 # how a stage ends which finds that this build, or machine, has not what it is about
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Prints "passed", "failed", that there is nothing to run, or that the limit has ended it.
outcome() {
  case $1 in
    0) echo passed ;;
    "$not_here") echo "not here" ;;
    124 | 137) echo "not over after $2 s" ;;
    *) echo failed ;;
  esac
}

# run_stage NAME LIMIT_S COMMAND: the command in a shell of its own; with its heading, its last lines go to $OUT. Returns
# its exit code.
run_stage() {
  local name=$1 limit=$2 command=$3 rc=0 begin=$SECONDS
  say "$name, $limit s at most"
  timeout --kill-after=10 "$limit" bash -euo pipefail -c "$command" >"$log" 2>&1 </dev/null || rc=$?
  local result
  result="$(outcome $rc "$limit"), rc $rc, $((SECONDS - begin)) s of $limit"
  {
    printf '\n## %s: %s\n\n' "$name" "$result"
    tail -n $shown_lines "$log" | sed 's/^/    /'
  } >>"$OUT"
  say "$name: $result"
  if ((rc != 0 && rc != not_here)); then tail -n $shown_lines "$log" >&2; fi
  return $rc
}

# without_run NAME WHY: the heading alone.
without_run() {
  printf '\n## %s: %s\n' "$1" "$2" >>"$OUT"
  say "$1: $2"
}

is_chosen() {
  local name=$1 word
  shift
  if (($# == 0)); then return 0; fi
  for word in "$@"; do
    if [[ $name == "$word"* ]]; then return 0; fi
  done
  return 1
}

mkdir -p "$(dirname "$OUT")"
device=$("$PYTHON" scripts/gpu_check/device.py) || exit 1
{
  echo "# gpu-check"
  echo
  echo "$(date -u +%Y-%m-%dT%H:%MZ), $device, revision $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
} >"$OUT"

failed=() ran=0 absent=0
while read -r name limit state command; do
  if [[ -z $name || $name == \#* ]] || ! is_chosen "$name" "$@"; then continue; fi
  left=$((within - SECONDS))
  if [[ $state != there ]]; then
    without_run "$name" "not there"
    absent=$((absent + 1))
  elif ((left <= 0)); then
    without_run "$name" "no time is left of $within s"
    failed+=("$name")
  else
    rc=0
    run_stage "$name" $((limit < left ? limit : left)) "$command" || rc=$?
    case $rc in
      0) ran=$((ran + 1)) ;;
      "$not_here") absent=$((absent + 1)) ;;
      *) ran=$((ran + 1)) failed+=("$name") ;;
    esac
  fi
done <"$table"

last="$ran stages ran, $absent are not there, ${#failed[@]} failed${failed:+: ${failed[*]}}"
printf '\n%s\n' "$last" >>"$OUT"
say "$last; $OUT has it all"
((ran + absent > 0)) || stop "no stage begins with: $*"
((${#failed[@]} == 0))
