#!/usr/bin/env bash
# Everything that needs a GPU, in one go: correctness first, then the benchmark, a short table last.
#
#     tests/gpu/run.sh [--quick] [WHEELS]
#
# Takes cupy-cuda13x (or 12x), numpy, grpcio and pytest as $PYTHON (python3) has them, in a virtual environment or not.
# What else is needed is installed, without an index and without what the wheels ask for, from WHEELS (this folder's
# `wheels` unless given): under 60 MiB. For the machine's Python, here 3.12 on x86-64:
#
#     pip download --no-deps --dest tests/gpu/wheels --only-binary :all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
#       --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#       ucxx-cu13==0.52.* libucxx-cu13==0.52.* libucx-cu13==1.21.* rmm-cu13==26.10.* librmm-cu13==26.10.* rapids-logger \
#       ml-dtypes xxhash protobuf googleapis-common-protos grpcio-health-checking grpcio-reflection pydantic \
#       pydantic-core pydantic-settings annotated-types typing-inspection typing-extensions python-dotenv structlog \
#       prometheus-client typer annotated-doc click shellingham rich markdown-it-py mdurl hypothesis sortedcontainers \
#       pytest-timeout
#
# Writes to $OUT where that is set, a handful of files, else to a folder of its own, which it names. Every step has a limit; one
# that fails is a row of the table, and the next one runs. Exit status 1 if any failed, 3 if nothing could be run.
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
work=$(mktemp -d "${TMPDIR:-/tmp}/hurray-gpu-work.XXXXXX")
trap 'rm -rf "$work"' EXIT
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

# No environment of its own: one made from an environment does not see what that has, CUDA's libraries included.
site=$work/site
mkdir -p "$site" "$work/bin"
python=$(command -v "$python")
step "$("$python" --version 2>&1) at $python"
if compgen -G "$wheels/*.whl" >/dev/null; then
  # A wheel is a zip archive: no pip and no index are needed to put one in place.
  "$python" - "$site" "$wheels"/*.whl >"$out/setup.txt" 2>&1 <<'PYTHON' ||
import os
import sys
import zipfile

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

site, *wheels = sys.argv[1:]
here = frozenset(sys_tags())
for wheel in wheels:
    name, version, _, tags = parse_wheel_filename(os.path.basename(wheel))
    fits = not here.isdisjoint(tags)
    print(name, version, "" if fits else f"is for another Python or machine: {wheel}")
    if fits:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
PYTHON
    give_up "the wheels: $(tail -n 1 "$out/setup.txt")"
else
  step "no wheels in $wheels: what the machine has must do"
fi
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
mkdir -p "$site/hurray_transfer-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: hurray-transfer\nVersion: %s\n' "$version" \
  >"$site/hurray_transfer-$version.dist-info/METADATA"
# Of hurrayctl the benchmark alone: the rest wants cryptography, which is large.
printf '#!%s\nfrom hurray_server.main import main\nmain()\n' "$python" >"$work/bin/hurrayd"
printf '#!%s\nimport typer\nfrom hurray_client.cli.bench import bench\ntyper.run(bench)\n' "$python" \
  >"$work/bin/hurray-bench"
chmod +x "$work/bin/hurrayd" "$work/bin/hurray-bench"
export PYTHONPATH=$root:$root/server:$root/client:$root/tests:$site PATH=$work/bin:$PATH PYTHONUNBUFFERED=1
export CUPY_CACHE_DIR=$work/cupy

missing=$(timeout 60 "$python" - 2>>"$out/setup.txt" <<'PYTHON'
import importlib

NEEDED = ("cupy", "numpy", "grpc", "pytest", "ml_dtypes", "xxhash", "google.protobuf", "google.rpc.status_pb2",
          "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "pydantic_settings", "structlog", "typer",
          "prometheus_client", "rich", "hypothesis", "pytest_timeout", "hurray_server.main", "hurray_client.cli.bench")
for name in NEEDED:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {error}")
PYTHON
) || give_up "Python does not run: $(tail -n 1 "$out/setup.txt")"
[ -z "$missing" ] || give_up "this is missing, here and in $wheels:"$'\n'"$missing"
why=$(timeout 30 "$python" -c 'from hurray_wire.cuda import why_no_cuda; print(why_no_cuda() or "")') ||
  give_up "CuPy does not start"
[ -z "$why" ] || give_up "$why"
ucx=$(timeout 30 "$python" -c '
from hurray_wire.transport.ucx import loaded_ucx
found = loaded_ucx()
print(found["version"], found["path"], found["transports"])' 2>&1) || ucx="not loaded: $(tail -n 1 <<<"$ucx")"
step "UCX: $ucx"
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
    rows+=("$name|passed|$(grep -E '[0-9]+ passed' "$log" | tail -n 1)")
  else
    failed=1
    rows+=("$name|FAILED ($status)|$(grep -m 3 -E '^(FAILED|ERROR|E  )' "$log" | tr '\n' ' ' | cut -c 1-300)")
    tail -n 25 "$log" >&2
  fi
}
# Of the plugins that the machine has only the one that is asked for, and other libraries' warnings are no errors.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 HURRAYTEST_GPU=required  # a GPU that is not found is a failure here, not a skip
tests=("$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p pytest_timeout -p no:cacheprovider
  -o filterwarnings=default -o timeout=60 -q -m gpu)
check kernels 100 "${tests[@]}" tests/gpu/test_kernels_gpu.py
check transfers 120 "${tests[@]}" tests/gpu/test_handoff_gpu.py

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -z "$sanitizer" ]; then
  rows+=("sanitizer|skipped|there is no compute-sanitizer")
elif ! timeout 30 "$sanitizer" --error-exitcode 9 "$python" -c 'import cupy; cupy.zeros(1).get()' >"$out/sanitizer.txt" 2>&1; then
  rows+=("sanitizer|skipped|it does not run here: $(grep -m 1 -iE 'error|not supported' "$out/sanitizer.txt" | cut -c 1-100)")
else
  check sanitizer 80 "$sanitizer" --error-exitcode 9 "${tests[@]}" -o timeout=0 tests/gpu/test_kernels_gpu.py -k small
fi

# --- speed ----------------------------------------------------------------------------------------------------------

step "benchmark"
if timeout --kill-after 10 150 hurray-bench --device cuda ${quick[@]+"${quick[@]}"} --json \
  >"$out/bench.json" 2>"$out/bench.txt"; then
  rows+=("benchmark|ran|$out/bench.json")
else
  rows+=("benchmark|FAILED ($?)|$out/bench.txt")
  failed=1
  tail -n 15 "$out/bench.txt" >&2
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
    "$python" - "$out/bench.json" <<'PYTHON'
import json
import sys

from hurray_client.bench import gpu

found = json.load(open(sys.argv[1]))
if "ratios" in found:
    for row in gpu.rows(found):
        print("%-42s %-40s %-9s %s" % row)
    for kind in ("skipped", "failed"):
        for name, reason in found[kind].items():
            print(f"{name} {kind}: {reason[:300]}")
PYTHON
  fi
} | tee "$out/table.txt"
exit "$failed"
