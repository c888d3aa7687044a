#!/bin/bash
# rehearse_release.sh BIN PYTHON...: builds the sdist and the wheel as a release does, checks their metadata, and tries
# them as users would: each PYTHON (such as 3.10) gets a new environment with the wheel, and the first gets the sdist,
# too. There, outside this checkout, the quickstart of the documentation runs against a Kafka. BIN: the folder of the
# development environment's programs. An index of packages is asked for dependencies only, never for this package.
set -euo pipefail
bin=$(cd "$1" && pwd)
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(mktemp -d)
# A background job has a process group of its own, which ends as a whole.
set -m
broker=
trap '[ -z "$broker" ] || kill -INT -- "-$broker" 2>/dev/null || :; wait; rm -rf "$folder"' EXIT

echo "Building ..."
"$bin/uv" venv --quiet --python "$bin/python" "$folder/tools"
"$bin/uv" pip install --quiet --python "$folder/tools/bin/python" --require-hashes --no-deps -r "$root/.github/release-tools.txt"
"$bin/uv" pip install --quiet --python "$folder/tools/bin/python" twine
(cd "$root" && "$folder/tools/bin/python" -m build --no-isolation --outdir "$folder/dist" >"$folder/build.log" 2>&1) || {
    tail -20 "$folder/build.log" >&2
    exit 1
}
"$folder/tools/bin/python" -m twine check --strict "$folder"/dist/*

# All blocks of Python in the quickstart, in one program.
"$bin/python" - "$root/docs/quickstart.md" >"$folder/quickstart.py" <<'PYTHON'
import re, sys
text = open(sys.argv[1], encoding="utf-8").read()
blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
print("\n".join(blocks))
PYTHON
port=$("$bin/python" -c 'from local_kafka.node_config import free_port; print(free_port(set()))')
"$bin/local-kafka" --port "$port" >"$folder/broker.log" 2>&1 &
broker=$!
sed -i "s/127\.0\.0\.1:9092/127.0.0.1:$port/g; s/localhost:9092/127.0.0.1:$port/g" "$folder/quickstart.py"
for _ in $(seq 300); do
    grep -q ":$port" "$folder/broker.log" && break
    kill -0 "$broker" 2>/dev/null || { cat "$folder/broker.log" >&2; exit 1; }
    sleep 0.2
done

try() { # VERSION FILE
    python=$("$root/tools/find_python.sh" "$1") || { echo "No Python $1 here: not tried."; return 0; }
    venv="$folder/venv-$1-${2##*.}"
    "$bin/uv" venv --quiet --python "$python" "$venv"
    "$bin/uv" pip install --quiet --python "$venv/bin/python" "$2[spark]" 'confluent-kafka>=2.6'
    mkdir -p "$folder/elsewhere" && cd "$folder/elsewhere"
    PYTHONPATH='' PYSPARK_PYTHON="$venv/bin/python" "$venv/bin/kafka-chunked-doctor" --bootstrap-servers "127.0.0.1:$port" >"$folder/doctor.log" 2>&1 || {
        tail -30 "$folder/doctor.log" >&2
        return 1
    }
    PYTHONPATH='' PYSPARK_PYTHON="$venv/bin/python" timeout 300 "$venv/bin/python" "$folder/quickstart.py" \
        >"$folder/quickstart.log" 2>&1 || { tail -40 "$folder/quickstart.log" >&2; return 1; }
    version=$("$venv/bin/python" -c 'import kafka_sink; print(kafka_sink.__version__, kafka_sink.__file__)')
    case $version in *"$venv"*) ;; *) echo "error: $version is not the installed one" >&2; return 1 ;; esac
    echo "Python $1, ${2##*/}: the doctor and the quickstart have run."
    rm -rf "$venv"
}
try "$1" "$(echo "$folder"/dist/*.tar.gz)"
for version in "$@"; do
    try "$version" "$(echo "$folder"/dist/*.whl)"
done

"$bin/uv" pip install --quiet --python "$folder/tools/bin/python" py-rattler-build
"$folder/tools/bin/python" - "$root/recipe/recipe.yaml" <<'PYTHON'
import sys
from rattler_build import Stage0Recipe, VariantConfig
Stage0Recipe.from_file(sys.argv[1]).render(VariantConfig({"python_min": ["3.10"]}))
PYTHON
echo "The conda recipe renders. It was not built, because that takes the packages of conda-forge."
