#!/usr/bin/env bash
# Writes hurray_wire/v1 from the .proto files; with --check, fails if what is there is not what would be written.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
package=hurray_wire/v1
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

google=$("$python" -c 'from pathlib import Path; from google.rpc import status_pb2; print(Path(status_pb2.__file__).parents[2])')
protoc=("$python" -m grpc_tools.protoc --proto_path=proto "--proto_path=$google")
"${protoc[@]}" "--python_out=$fresh" "--pyi_out=$fresh" "proto/$package/transfer.proto" "proto/$package/mover.proto"
"${protoc[@]}" "--grpc_python_out=$fresh" "proto/$package/transfer.proto"
touch "$fresh/$package/__init__.py"

if [ "${1:-}" != --check ]; then
  cp "$fresh/$package"/* "$package/"
elif ! diff --recursive --brief --exclude=__pycache__ "$fresh/$package" "$package"; then
  echo "$package is stale: run proto/generate.sh" >&2
  exit 1
fi
