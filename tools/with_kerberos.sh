#!/usr/bin/env bash
# Usage: with_kerberos.sh FOLDER PYTHON COMMAND...
# Runs a command with MIT's KDC and the package gssapi. Debian's packages are unpacked into the folder, so the
# system stays as it is: "apt-get --simulate" says which of them it lacks.
set -euo pipefail
folder=$(realpath -m "$1") python=$2
shift 2
if [ ! -e "$folder/done" ]; then
    mkdir -p "$folder/root"
    missing=$(apt-get install --simulate --no-install-recommends krb5-admin-server krb5-user libkrb5-dev |
        awk '$1 == "Inst" { print $2 }')
    if [ -n "$missing" ]; then
        # shellcheck disable=SC2086 # one word for each package
        (cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root $missing)
        for package in "$folder"/*.deb; do dpkg -x "$package" "$folder/root"; done
    fi
fi
libraries=$(find "$folder/root" -name libkrb5.so.3 -printf '%h')
export PATH="$folder/root/usr/sbin:$folder/root/usr/bin:$PATH" PYTHONPATH="$folder/site:${PYTHONPATH:-}"
if [ -n "$libraries" ]; then
    export LD_LIBRARY_PATH="$libraries:${LD_LIBRARY_PATH:-}"
    # The krb5-config that was unpacked names the system's folders.
    export GSSAPI_COMPILER_ARGS="-I$folder/root/usr/include -DHAS_GSSAPI_EXT_H"
    export GSSAPI_LINKER_ARGS="-L$libraries -lgssapi_krb5" GSSAPI_MAIN_LIB="$libraries/libgssapi_krb5.so.2"
fi
[ -e "$folder/done" ] || "$python" -m pip install --quiet --target "$folder/site" gssapi
touch "$folder/done"
exec "$@"
