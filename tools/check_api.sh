#!/bin/sh
# check_api.sh BIN: installs the wheel into a new environment, as a user would, and asks pyright whether it knows the
# type of every name that the package exports. BIN: the folder of the development environment's programs.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$bin/python" -m hatchling build -t wheel -d "$folder" >/dev/null 2>&1
"$bin/uv" venv --quiet --python "$bin/python" "$folder/venv"
"$bin/uv" pip install --quiet --python "$folder/venv/bin/python" --constraint constraints.txt "$folder"/*.whl pyspark pandas
# pyright takes the environment from PATH. Its extra brings node along.
"$bin/uv" venv --quiet --python "$bin/python" "$folder/tool"
"$bin/uv" pip install --quiet --python "$folder/tool/bin/python" 'pyright[nodejs]'
cd "$folder"
PATH="$folder/venv/bin:$PATH" VIRTUAL_ENV="$folder/venv" "$folder/tool/bin/pyright" --verifytypes kafka_sink --ignoreexternal --outputjson >"$folder/types.json" || true
"$bin/python" "$here/api_types.py" "$folder/types.json"
