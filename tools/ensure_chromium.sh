#!/bin/sh
# Makes sure that Chromium and its driver are there, for the test of the live view's page: nothing to do where they
# are, installed by apt where this runs as root, else the one command is printed and this fails.
set -u

browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
driver=$(command -v chromedriver || true)
if [ -n "$browser" ] && [ -n "$driver" ]; then
    echo "Chromium: $browser, $driver"
    exit 0
fi

if command -v apt-get >/dev/null; then
    packages="chromium chromium-driver"
    if [ "$(id -u)" = 0 ]; then
        if [ "${KAFKA_CHUNKED_INSTALL:-yes}" = no ]; then
            echo "error: Chromium or its driver is missing; KAFKA_CHUNKED_INSTALL=no forbids to install it. As root:" >&2
            echo "    apt-get install -y $packages" >&2
            exit 1
        fi
        echo "Chromium or its driver is missing; installing $packages with apt for the whole system."
        echo "To refuse, stop this (Ctrl-C) and set KAFKA_CHUNKED_INSTALL=no."
        if [ -t 0 ]; then sleep 5; fi
        apt-get update -qq || echo "warning: apt-get update failed; trying with the lists at hand" >&2
        # shellcheck disable=SC2086
        if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null; then
            exit 0
        fi
        echo "error: apt could not install $packages; install Chromium and chromedriver and try again." >&2
        exit 1
    fi
    command="sudo apt-get install -y $packages"
elif command -v dnf >/dev/null; then
    command="sudo dnf install -y chromium chromedriver"
elif command -v apk >/dev/null; then
    command="sudo apk add chromium chromium-chromedriver"
elif command -v pacman >/dev/null; then
    command="sudo pacman -S --noconfirm chromium"
else
    command="(install Chromium and chromedriver)"
fi
echo "error: the test of the live view's page needs Chromium and chromedriver. Install them with:" >&2
echo "    $command" >&2
exit 1
