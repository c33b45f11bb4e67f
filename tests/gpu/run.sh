#!/usr/bin/env bash
# Everything that needs a GPU, in one go: correctness first, then the benchmark, a short table last.
#
#     tests/gpu/run.sh [--quick] [WHEELS]
#
# Takes cupy-cuda13x (or 12x), numpy, grpcio and pytest as the machine has them. What else is needed is installed, without
# an index and without what the wheels ask for, from WHEELS (this folder's `wheels` unless given):
#
#     pip download --no-deps --dest tests/gpu/wheels --only-binary :all: \
#       ucxx-cu13==0.52.* libucxx-cu13==0.52.* libucx-cu13==1.21.* rapids-logger \
#       ml-dtypes xxhash protobuf googleapis-common-protos grpcio-health-checking grpcio-reflection pydantic \
#       pydantic-core pydantic-settings annotated-types typing-inspection typing-extensions python-dotenv \
#       structlog typer click shellingham rich pygments markdown-it-py mdurl cryptography cffi pycparser \
#       hypothesis sortedcontainers pytest-timeout
#
# Writes to $OUT where that is set, else to a folder of its own, which it names.
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
here=$root/tests/gpu

quick=()
wheels=$here/wheels
for argument in "$@"; do
  case $argument in
    --quick) quick=(--quick) ;;
    -*) echo "unknown option $argument; there is --quick" >&2; exit 2 ;;
    *) wheels=$(cd "$argument" && pwd) || exit 2 ;;
  esac
done

out=${OUT:-$(mktemp -d "${TMPDIR:-/tmp}/hurray-gpu.XXXXXX")}
mkdir -p "$out"
python=${PYTHON:-python3}
began=$SECONDS
step() { printf '%5d s  %s\n' "$((SECONDS - began))" "$*" >&2; }
give_up() { echo "tests/gpu/run.sh: $*" >&2; exit 3; }

command -v "$python" >/dev/null || give_up "there is no $python: name one with PYTHON="
command -v nvidia-smi >/dev/null || give_up "there is no NVIDIA driver here (no nvidia-smi): nothing was run"
nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader >"$out/gpu.txt" 2>&1 ||
  give_up "nvidia-smi finds no GPU: $(head -n 1 "$out/gpu.txt")"
step "GPU: $(head -n 1 "$out/gpu.txt")"

# --- what is needed -------------------------------------------------------------------------------------------------

venv=$out/venv
step "environment in $venv"
if ! "$python" -m venv --system-site-packages --without-pip "$venv" 2>"$out/venv.txt"; then
  give_up "no environment: $(tail -n 1 "$out/venv.txt")"
fi
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if compgen -G "$wheels/*.whl" >/dev/null; then
  # A wheel is a zip archive: no pip and no index are needed to put one in place.
  "$venv/bin/python" - "$site" "$wheels"/*.whl <<'PYTHON' || give_up "the wheels in $wheels cannot be unpacked"
import sys
import zipfile

site, *wheels = sys.argv[1:]
for wheel in wheels:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
PYTHON
else
  step "no wheels in $wheels: what the machine has must do"
fi
printf '%s\n' "$root" "$root/server" "$root/client" "$root/tests" >"$site/hurray.pth"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
mkdir -p "$site/hurray_transfer-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: hurray-transfer\nVersion: %s\n' "$version" \
  >"$site/hurray_transfer-$version.dist-info/METADATA"
for entry in hurrayd=hurray_server.main hurrayctl=hurray_client.cli.main; do
  printf '#!%s\nfrom %s import main\nmain()\n' "$venv/bin/python" "${entry#*=}" >"$venv/bin/${entry%%=*}"
  chmod +x "$venv/bin/${entry%%=*}"
done

missing=$("$venv/bin/python" - <<'PYTHON'
import importlib

NEEDED = ("cupy", "numpy", "grpc", "pytest", "ml_dtypes", "xxhash", "google.protobuf", "google.rpc.status_pb2",
          "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "pydantic_settings", "structlog", "typer",
          "cryptography", "hypothesis")
for name in NEEDED:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {error}")
PYTHON
) || give_up "the environment does not work"
[ -z "$missing" ] || give_up "this is missing, here and in $wheels:"$'\n'"$missing"
why=$("$venv/bin/python" -c 'from hurray_wire.cuda import why_no_cuda; print(why_no_cuda() or "")') ||
  give_up "hurray_wire cannot be imported"
[ -z "$why" ] || give_up "$why"
ucx=$("$venv/bin/python" -c '
from hurray_wire.transport.ucx import loaded_ucx
found = loaded_ucx()
print(found["version"], found["path"], found["transports"])' 2>&1) || ucx="not loaded: $(tail -n 1 <<<"$ucx")"
step "UCX: $ucx"
printf '%s\n' "$ucx" >"$out/ucx.txt"

# --- correctness ----------------------------------------------------------------------------------------------------

declare -a rows=()
failed=0
check() { # NAME LIMIT COMMAND...: run it, keep its output, and a row of the table
  local name=$1 limit=$2 log="$out/$1.txt" status
  shift 2
  step "$name"
  timeout --kill-after 10 "$limit" "$@" >"$log" 2>&1
  status=$?
  if [ "$status" -eq 0 ]; then
    rows+=("$name|passed|$(tail -n 1 "$log")")
  else
    failed=1
    rows+=("$name|FAILED ($status)|$log")
    tail -n 25 "$log" >&2
  fi
}
tests=("$venv/bin/python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -q)
export HURRAYTEST_GPU=required  # a GPU that is not found is a failure here, not a skip
check correctness 240 "${tests[@]}" -m gpu tests/gpu

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -n "$sanitizer" ]; then
  check sanitizer 150 "$sanitizer" --error-exitcode 9 --target-processes all --launch-timeout 60 \
    "${tests[@]}" -m gpu tests/gpu/test_kernels_gpu.py -k "small"
else
  rows+=("sanitizer|skipped|there is no compute-sanitizer")
fi

# --- speed ----------------------------------------------------------------------------------------------------------

step "benchmark"
if timeout --kill-after 10 200 "$venv/bin/hurrayctl" bench --device cuda "${quick[@]}" --json \
  >"$out/bench.json" 2>"$out/bench.txt"; then
  rows+=("benchmark|ran|$out/bench.json")
else
  failed=1
  rows+=("benchmark|FAILED|$out/bench.txt")
  tail -n 15 "$out/bench.txt" "$out/bench.json" >&2
fi

# --- the table ------------------------------------------------------------------------------------------------------

{
  echo
  echo "GPU: $(head -n 1 "$out/gpu.txt")"
  echo "UCX: $ucx"
  for row in "${rows[@]}"; do
    IFS='|' read -r name outcome note <<<"$row"
    printf '%-12s %-12s %s\n' "$name" "$outcome" "$note"
  done
  if [ -s "$out/bench.json" ]; then
    "$venv/bin/python" - "$out/bench.json" <<'PYTHON'
import json
import sys

from hurray_client.bench import gpu

found = json.load(open(sys.argv[1]))
if "ratios" in found:
    for row in gpu.rows(found):
        print("%-42s %-40s %-9s %s" % row)
    for name, reason in found["skipped"].items():
        print(f"{name}: {reason}")
PYTHON
  fi
} | tee "$out/table.txt"
exit "$failed"
